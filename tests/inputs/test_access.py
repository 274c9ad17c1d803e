"""Which images may be read from where, and how many bytes of them. Hostile URLs stand in test_fetch."""

import base64
import os
import pathlib
import socket

import pytest

from vlcache_jax import LLM
from vlcache_jax.inputs import access
from vlcache_jax.inputs.access import LOCAL_ONLY, Access
from vlcache_jax.inputs.images import read_image

# --- arguments -------------------------------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    *(("allow_remote_images", value, "be a bool") for value in ("no", "", 0, 1, None)),
    *(("allowed_media_domains", value, "be a list of host names") for value in ("a.example", 5, {"a": 1}, b"a")),
    *(
        ("allowed_media_domains", [value], "be host names, without scheme or port, and addresses in their usual form")
        for value in ("https://a.example", "a.example:80", "*.a", "", ".", "..a", "a b", "2130706433", "127.1", None, 5)
    ),
    *(
        ("allowed_local_media_path", value, "be a folder or None")
        for value in ("/no/such", os.devnull, "\0", "\ud800", True, False, 5, b"/", ["/"])
    ),
    *(
        ("max_image_bytes", value, "be a non-negative number of bytes")
        for value in (-1, True, 1.5, None, "many", "64 M")
    ),
]


@pytest.mark.parametrize(("argument", "value", "expectation"), BAD_ARGUMENTS)
def test_arguments_are_checked_before_anything_is_loaded(argument, value, expectation):
    for make in (Access, lambda **given: LLM("no/such/checkpoint", **given)):
        with pytest.raises(ValueError, match=f"^{argument} must {expectation}"):
            make(**{argument: value})


def test_defaults():
    assert Access() == LOCAL_ONLY == Access(False, None, "/", "64MiB")
    assert LOCAL_ONLY.max_image_bytes == 64 * 2**20


def test_nothing_is_fetched_unless_allowed(monkeypatch):
    monkeypatch.setattr(access, "fetch", lambda *_, **__: pytest.fail("fetched"))
    for url in ("http://pictures.example/a.png", "HTTPS://pictures.example/a.png"):
        with pytest.raises(
            ValueError, match=rf"^images.3. must be local unless allow_remote_images=True, got '{url}'$"
        ):
            read_image(url, name="images[3]")


# --- local files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder `pictures` beside a secret, and links in all directions. It is where paths begin."""
    (tmp_path / "pictures" / "sub").mkdir(parents=True)
    (tmp_path / "pictures" / "a.png").write_bytes(b"picture")
    (tmp_path / "secret.png").write_bytes(b"secret")
    for link, target in [
        ("pictures/in", "a.png"),
        ("pictures/out", "../secret.png"),
        ("pictures/up", ".."),
        ("pictures/loop", "loop"),
        ("alias", "pictures"),
        ("far", "/usr/share"),
    ]:
        (tmp_path / link).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


ALLOWED = [
    "pictures/a.png",
    "./pictures/sub/../a.png",
    "pictures/../pictures/a.png",
    "pictures/in",
    "pictures/up/pictures/a.png",
    "alias/a.png",
    "{tree}/pictures/a.png",
]
FORBIDDEN = [
    "secret.png",
    "pictures/../secret.png",
    "pictures/sub/../../secret.png",
    "pictures/out",
    "pictures/up/secret.png",
    "alias/../secret.png",
    "{tree}/secret.png",
    "{tree}/pictures-too/a.png",
    "/etc/passwd",
    "far",
]


@pytest.mark.parametrize("folder", ["pictures", "alias", "{tree}/pictures/", pathlib.Path("pictures/sub/..")])
@pytest.mark.parametrize("path", ALLOWED)
def test_files_in_the_folder(tree, folder, path):
    folder = folder.format(tree=tree) if isinstance(folder, str) else folder
    allowed = Access(allowed_local_media_path=folder)
    for value in (path.format(tree=tree), pathlib.Path(path.format(tree=tree))):
        assert read_image(value, access=allowed).encoded == b"picture"


@pytest.mark.parametrize("path", FORBIDDEN)
def test_files_elsewhere_are_refused_in_the_same_words_whether_they_exist_or_not(tree, path):
    allowed = Access(allowed_local_media_path="pictures")
    for value in (path.format(tree=tree), path.format(tree=tree).replace("secret", "missing")):
        with pytest.raises(ValueError, match=r"^images.3. must be the path of a readable file, got '") as caught:
            read_image(value, access=allowed, name="images[3]")
        assert str(caught.value).endswith(f"got {value!r}: not allowed by allowed_local_media_path")


@pytest.mark.parametrize("folder", [None, ""])
@pytest.mark.parametrize("path", [*ALLOWED, *FORBIDDEN, "missing.png", "file:///etc/passwd"])
def test_no_folder_allows_no_file(tree, folder, path):
    with pytest.raises(ValueError, match=r"not allowed by allowed_local_media_path$"):
        read_image(path.format(tree=tree), access=Access(allowed_local_media_path=folder))


@pytest.mark.parametrize("folder", [None, "", "/"])
def test_urls_of_other_kinds_are_no_files(folder):
    with pytest.raises(ValueError, match=r"a URL that begins with data:, .* got 'ftp://host/a.png'$"):
        read_image("ftp://host/a.png", access=Access(allowed_local_media_path=folder))


def test_the_root_allows_every_file(tree):
    for path in ("secret.png", "pictures/out"):
        assert read_image(path).encoded == b"secret"
    with pytest.raises(ValueError, match="no such file"):  # beside what the link leads to, as the system reads it
        read_image("far/../secret.png")


@pytest.mark.parametrize("place", ["far", "missing", "secret.png"])
def test_dots_tell_nothing_of_what_lies_elsewhere(tree, place):
    allowed = Access(allowed_local_media_path="pictures")
    assert read_image(f"{place}/../pictures/a.png", access=allowed).encoded == b"picture"


@pytest.mark.parametrize("path", ["pictures/out", "pictures/up/secret.png"])
@pytest.mark.parametrize("seen", ["before it was looked at", "after it was looked at"])
def test_a_link_that_appears_after_the_check_is_not_followed(tree, monkeypatch, path, seen):
    allowed = Access(allowed_local_media_path="pictures")
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)  # as if no link had been there yet
    if seen == "after it was looked at":
        monkeypatch.setattr(access, "S_ISREG", lambda _: True)
    with pytest.raises(
        ValueError, match=r"got 'pictures/.*': (not a regular file|Not a directory|Too many levels of symbolic links)$"
    ):
        read_image(path, access=allowed)


@pytest.mark.parametrize("folder", ["/", "."])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing.png", "no such file"),
        ("pictures/a.png/b", "Not a directory"),
        ("pictures/loop", "Too many levels of symbolic links|not a regular file"),
        ("pictures", "a directory"),
        (".", "a directory"),
        ("pipe", "not a regular file"),
        ("socket", "not a regular file"),
        ("a\0b", "embedded null byte|.*null character.*"),
        ("\ud800", ".*surrogates not allowed"),
        ("a" * 300, "File name too long"),
    ],
)
def test_what_is_no_file_is_named(tree, folder, path, reason):
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(ValueError, match=f"^image must be the path of a readable file, got .*: ({reason})$"):
            read_image(path, access=Access(allowed_local_media_path=folder))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/stdin", "/"])
def test_devices_are_not_opened(path, monkeypatch):
    monkeypatch.setattr(os, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ValueError, match=r"readable file, got .*: (a directory|not a regular file|no such file)$"):
        read_image(path)


def test_a_pipe_in_the_place_of_a_file_does_not_wait(tree, monkeypatch):
    os.mkfifo("pipe")
    monkeypatch.setattr(access, "S_ISREG", lambda _: True)
    with pytest.raises(ValueError, match="image must not be empty"):
        read_image("pipe")


def test_a_file_that_may_not_be_read(tree, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "secret")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match=r"must be the path of a readable file, got 'secret.png': Permission denied$"):
        read_image("secret.png")


# --- bytes -----------------------------------------------------------------------------------------------------------

PICTURE = bytes(range(100))
CODED = base64.b64encode(PICTURE).decode()
ENCODED = {
    "bytes": PICTURE,
    "file": "picture.png",
    "data URL": f"data:image/png;base64,{CODED}",
    "data URL in lines": "data:image/png;base64," + base64.encodebytes(PICTURE).decode(),
}


@pytest.mark.parametrize("kind", ENCODED)
@pytest.mark.parametrize("folder", ["/", "."])
def test_bytes_are_limited(tmp_path, monkeypatch, kind, folder):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("picture.png").write_bytes(PICTURE)
    value = ENCODED[kind]
    assert read_image(value, access=Access(False, None, folder, 100)).encoded == PICTURE
    with pytest.raises(
        ValueError, match=r"^images.3. must have at most 99 bytes, got (100|a larger file): raise max_image_bytes$"
    ):
        read_image(value, access=Access(False, None, folder, 99), name="images[3]")


@pytest.mark.parametrize("spaces", ["", " \n" * 1000])
def test_a_long_data_url_is_not_decoded(monkeypatch, spaces):
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="image must have at most 90 bytes, got 100"):
        read_image(ENCODED["data URL"] + spaces, access=Access(max_image_bytes=90))


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(3 * 2**30)
    monkeypatch.setattr(access, "read_at_most", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match="image must have at most 67108864 bytes, got a larger file"):
        read_image(path)


def test_a_file_that_grows_is_read_to_the_limit(tmp_path, monkeypatch):
    path, small = tmp_path / "a.png", os.stat(tmp_path)
    with path.open("wb") as file:
        file.truncate(3 * 2**30)
    monkeypatch.setattr(os, "fstat", lambda _: small)
    with pytest.raises(ValueError, match="image must have at most 2000000 bytes, got a larger file"):
        read_image(path, access=Access(max_image_bytes="2MB"))
