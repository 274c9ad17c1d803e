"""Vectors, orders of documents, uploaded files and the operator's libraries over HTTP."""

from __future__ import annotations

import base64
import hashlib
import io
import json

import numpy as np
import openai
import pytest
from PIL import Image

from tests.helper import eventually
from tests.server.helper import data_url, open_reranker
from vlcache_jax import LLM
from vlcache_jax.library import Library

CHAT, ADMIN = "/v1/chat/completions", "root"
KEYS = {"a": "alice", "b": "bob"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = open_reranker(tmp_path_factory.mktemp("embedder"))
    yield engine
    engine.service.close()


@pytest.fixture(scope="module")
def llm(engine):
    return LLM(engine.service)


@pytest.fixture
def keys(tmp_path):
    parts = [
        f'[[keys]]\nname = "{key}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n'
        for key, tenant in KEYS.items()
    ]
    path = tmp_path / "keys.toml"
    path.write_text("".join(parts))
    return str(path)


@pytest.fixture
def pictures(textured_image):
    return [textured_image(64 + 32 * (i % 2), 96, i) for i in range(4)]


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def shows(part, text="What is it?"):
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": text}]}], "max_tokens": 2,
            "temperature": 0, "return_cache_report": True}  # fmt: skip


def upload(served, path, content, method="POST", key=None, name="a.png", **fields):
    """Status and answer of a form."""
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
        for field, value in fields.items()
    ]
    if content is not None:
        head = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        parts += [head.encode(), content, b"\r\n"]
    headers = {"Content_Type": "multipart/form-data; boundary=x"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return served.json(method, path, b"".join(parts) + b"--x--\r\n", **headers)


def test_vectors_are_those_of_python(serve, client, llm, pictures):
    served = serve()
    openai_client = client(served, strict=False)  # it asks for base64, which its own types do not know
    [expected] = llm.embed("a red shoe", use_tqdm=False)
    for input in ("a red shoe", ["a red shoe"], [{"type": "text", "text": "a red shoe"}]):
        found = openai_client.embeddings.create(model=served.server.models[0], input=input)
        np.testing.assert_allclose(found.data[0].embedding, expected.outputs.embedding, atol=1e-6)
        assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    picture = {"type": "image_url", "image_url": {"url": data_url(pictures[0])}}
    body = {"input": ["b", picture, [picture, "which?"]], "dimensions": 8, "encoding_format": "float"}
    status, found = served.json("POST", "/v1/embeddings", body)
    assert status == 200, found
    outputs = llm.embed(["b", picture, [picture, "which?"]], dimensions=8, use_tqdm=False)
    for one, output in zip(found["data"], outputs, strict=True):
        np.testing.assert_allclose(one["embedding"], output.outputs.embedding, atol=1e-5)
    assert [one["index"] for one in found["data"]] == [0, 1, 2]
    messages = [{"role": "system", "content": "Find it."}, {"role": "user", "content": [picture]}]
    _, by_messages = served.json("POST", "/v1/embeddings", {"messages": messages})
    _, by_instruction = served.json("POST", "/v1/embeddings", {"input": picture, "instruction": "Find it"})
    np.testing.assert_allclose(by_messages["data"][0]["embedding"], by_instruction["data"][0]["embedding"], atol=1e-5)
    ids = expected.prompt_token_ids.tolist()
    for input in (ids, [ids]):
        found = openai_client.embeddings.create(model=served.server.models[0], input=input)
        np.testing.assert_allclose(found.data[0].embedding, expected.outputs.embedding, atol=1e-6)


def test_an_order_of_documents_is_that_of_python(serve, llm, pictures):
    served = serve()
    picture, other = ({"type": "image_url", "image_url": {"url": data_url(one)}} for one in pictures[:2])
    documents = ["a hat", {"text": "a shoe"}, {"content": [picture]}, other]
    body = {"query": "red", "documents": documents, "top_n": 3, "return_documents": True}
    for path in ("/v1/rerank", "/rerank"):
        status, found = served.json("POST", path, body)
        assert status == 200, found
        ranked = llm.rerank("red", ["a hat", "a shoe", picture, other], use_tqdm=False)
        assert [one["index"] for one in found["results"]] == [one.index for one in ranked[:3]]
        scores = [one["relevance_score"] for one in found["results"]]
        np.testing.assert_allclose(scores, [one.score for one in ranked[:3]], atol=1e-5)
        shown = {one["index"]: one["document"] for one in found["results"]}
        assert all(shown[i] == ({"text": "a hat"} if i == 0 else documents[i]) for i in shown)
    assert "document" not in served.json("POST", path, {**body, "return_documents": False})[1]["results"][0]


def test_what_is_wrong_is_said(serve, pictures):
    served = serve()
    for path, body, param, message in (
        ("/v1/embeddings", {}, "input", "exactly one of input and messages is required"),
        ("/v1/embeddings", {"input": "a", "messages": []}, "messages", "messages must have at least 1 item"),
        ("/v1/embeddings", {"input": []}, "input", "input must have 1 to 2048 elements, got 0"),
        ("/v1/embeddings", {"input": 3}, "input", "input must be a string or a list or an object, got 3"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input", "input[1] must be a string, a part of a message or a list"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "dimensions must be at least 1"),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, "dimensions", "dimensions must be an integer from 1"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "x"}, "encoding_format", "encoding_format must be one of"),
        ("/v1/embeddings", {"input": "a", "normalize": False}, "normalize", "normalize is not supported"),
        (
            "/v1/embeddings",
            {"input": "a", "reuse": "full"},
            "reuse",
            "reuse must be exact on this server, got 'full'; its operator can allow other values with --allow-reuse",
        ),
        ("/v1/embeddings", {"input": {"type": "image", "image": "/etc/passwd"}}, "input", "input"),
        ("/v1/embeddings", {"messages": [{"role": "x"}]}, "messages", "messages[0] must have the role"),
        ("/v1/embeddings", {"input": "a" * 9000}, "input", "input"),
        ("/v1/rerank", {"query": "a"}, "documents", "documents is required"),
        ("/v1/rerank", {"documents": ["a"]}, "query", "query is required"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "documents must have at least 1 item"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 3]}, "documents", "documents[1] must be a string"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n must be at least 0"),
    ):
        status, found = served.json("POST", path, body)
        assert status == 400, (body, found)
        assert found["error"]["param"] == param, (body, found)
        assert found["error"]["message"].startswith(message), (body, found)
    assert served.json("POST", "/v1/embeddings", {"input": "a", "model": "x"})[0] == 404
    assert "vlcache:prompt_tokens" in served.ask("GET", "/metrics")[2].decode()


def test_files_as_openais_client_has_them(serve, client, pictures):
    served = serve()
    openai_client = client(served)
    file = openai_client.files.create(file=("shoe.png", png(pictures[0])), purpose="vision",
                                      expires_after={"anchor": "created_at", "seconds": 3600})  # fmt: skip
    assert (file.filename, file.purpose, file.bytes) == ("shoe.png", "vision", len(png(pictures[0])))
    assert file.expires_at == file.created_at + 3600
    other = openai_client.files.create(file=("hat.png", png(pictures[1])), purpose="vision")
    assert [one.id for one in openai_client.files.list()] == [other.id, file.id]
    assert [one.id for one in openai_client.files.list(order="asc", limit=1)] == [file.id, other.id]  # page by page
    assert openai_client.files.retrieve(file.id) == file
    assert openai_client.files.content(file.id).read() == png(pictures[0])
    # It is named in chats and in responses, and is not computed again.
    for part in (
        {"type": "image_url", "image_url": {"url": f"file-id:{file.id}"}},
        {"type": "input_image", "file_id": file.id},
        {"type": "image", "library": "files", "id": file.id},
    ):
        status, found = served.json("POST", CHAT, shows(part))
        assert status == 200, found
        assert found["cache"]["images"][0]["encoder"] != "computed"
    by_bytes = {"type": "image_url", "image_url": {"url": data_url(pictures[0])}}
    _, expected = served.json("POST", CHAT, shows(by_bytes))
    assert found["choices"][0]["message"] == expected["choices"][0]["message"]
    response = openai_client.responses.create(
        model=served.server.models[0], max_output_tokens=2,
        input=[{"role": "user", "content": [{"type": "input_image", "file_id": file.id, "detail": "auto"},
                                            {"type": "input_text", "text": "What?"}]}],
    )  # fmt: skip
    assert response.output
    assert openai_client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        openai_client.files.retrieve(file.id)
    status, found = served.json("POST", CHAT, shows(part))
    assert (status, "has no" in found["error"]["message"]) == (400, True)
    openai_client.files.delete(other.id)


def test_uploads_that_are_wrong(serve, pictures):
    served = serve(max_file_bytes=100_000, max_files=1)
    good, ends = png(pictures[0]), {"purpose": "vision", "expires_after[anchor]": "created_at"}
    for content, fields, status, message in (
        (good, {}, 400, "purpose must be vision, got None"),
        (good, {"purpose": "batch"}, 400, "purpose must be vision, got 'batch'"),
        (None, {"purpose": "vision"}, 400, "file is required"),
        (b"", {"purpose": "vision"}, 400, "file must not be empty"),
        (b"no picture", {"purpose": "vision"}, 400, "file must be an image that Pillow can read"),
        (good, {"purpose": "vision", "other": "x"}, 400, "unknown field 'other' in body; expected one of file, "),
        (good, {"purpose": "vision", "expires_after[seconds]": "7200"}, 400, "expires_after.anchor must be created_at"),
        (good, ends | {"expires_after[seconds]": "1"}, 400, "expires_after must be from 3600 to 2592000 seconds, got"),
        (bytes(400_000), {"purpose": "vision"}, 413, "a body must have at most 100000 bytes"),
    ):  # fmt: skip
        found = upload(served, "/v1/files", content, **fields)
        assert found[0] == status, (fields, found)
        assert found[1]["error"]["message"].startswith(message), (fields, found)
    assert served.json("POST", "/v1/files", {"purpose": "vision"})[0] == 415
    body = b"--x\r\nContent-Disposition: form-data"
    assert served.json("POST", "/v1/files", body, Content_Type="multipart/form-data; boundary=x")[0] == 400
    assert served.json("POST", "/v1/files", b"x", Content_Type="multipart/form-data")[0] == 400
    elsewhere = {"Content_Type": "multipart/form-data; boundary=x", "Origin": "http://evil.example"}
    assert served.json("POST", "/v1/files", b"--x--\r\n", **elsewhere)[0] == 403
    assert served.json("GET", "/v1/files")[1]["data"] == []
    status, file = upload(served, "/v1/files", good, purpose="vision")
    assert status == 200, file
    assert upload(served, "/v1/files", png(pictures[1]), purpose="vision")[0] == 429
    lone = {"type": "image_url", "image_url": {"url": "file-id:\ud800"}}
    assert "must be" in served.json("POST", CHAT, shows(lone))[1]["error"]["message"]
    for path in ("/v1/files/file-0", f"/v1/files/file-{'0' * 24}", "/v1/files/..", "/v1/files/x/content"):
        assert served.json("GET", path)[0] == 404
    for query in ("limit=0", "limit=x", "order=up"):
        assert served.json("GET", f"/v1/files?{query}")[0] == 400
    assert served.json("GET", "/v1/files?after=file-x")[0] == 404
    assert served.json("GET", "/v1/files?purpose=batch")[1]["data"] == []
    assert served.json("DELETE", f"/v1/files/{file['id']}")[0] == 200
    assert served.json("DELETE", f"/v1/files/{file['id']}")[0] == 404


def test_who_may_see_what(serve, keys, engine, pictures):
    """Two tenants and an operator; each cell over Python and over HTTP."""
    served = serve(api_keys=keys, admin_key=ADMIN)
    salts = served.server.register.salts
    files = {key: upload(served, "/v1/files", png(pictures[i]), key=key, purpose="vision")[1]["id"]
             for i, key in enumerate("ab")}  # fmt: skip
    files["root"] = upload(served, "/libraries/files", png(pictures[2]), key=ADMIN, id="everyone's")[1]["id"]
    sees = {"a": {"a", "root"}, "b": {"b", "root"}, "root": {"root"}}
    llm = LLM(engine.service)
    refused = {}
    for key in ("a", "b", ADMIN):
        salt = None if key == ADMIN else salts.salt(KEYS[key])
        for whose, name in files.items():
            part = {"type": "image", "library": "files", "id": name}
            status, found = served.json("POST", CHAT, shows(part), Authorization=f"Bearer {key}")
            assert status == (200 if whose in sees[key] else 400), (key, whose, found)
            messages = shows(part)["messages"]
            [output] = llm.chat([messages], use_tqdm=False, cache_salt=salt, on_error="return")
            assert (output.error is None) == (whose in sees[key])
            if whose not in sees[key]:  # as one that there never was
                absent = {**part, "id": f"file-{'0' * 24}"}
                _, other = served.json("POST", CHAT, shows(absent), Authorization=f"Bearer {key}")
                told = [one["error"]["message"] for one in (found, other)]
                refused[key, whose] = told[0].replace(name, "") == told[1].replace(absent["id"], "")
            if key != ADMIN and whose != "root":
                status, _ = served.json("GET", f"/v1/files/{name}", Authorization=f"Bearer {key}")
                assert status == (200 if whose == key else 404)
                if whose != key:
                    assert served.json("DELETE", f"/v1/files/{name}", Authorization=f"Bearer {key}")[0] == 404
    assert len(refused) == 4
    assert all(refused.values())
    for key in "ab":
        _, told = served.json("GET", "/v1/files", Authorization=f"Bearer {key}")
        assert [one["id"] for one in told["data"]] == [files[key]]
        assert [item.id for item in Library(engine, "files", salts.salt(KEYS[key]).of_tenant).items()] == [files[key]]
        assert served.json("GET", "/libraries", Authorization=f"Bearer {key}")[0] == 403
        assert upload(served, "/libraries/x", png(pictures[0]), key=key, id="y")[0] == 403
    # A request of a tenant that names a salt of its own sees the tenant's files, too.
    part = {"type": "image", "library": "files", "id": files["a"]}
    assert served.json("POST", CHAT, {**shows(part), "cache_salt": "own"}, Authorization="Bearer a")[0] == 200
    for key in "ab":
        assert served.json("DELETE", f"/v1/files/{files[key]}", Authorization=f"Bearer {key}")[0] == 200
    assert served.json("DELETE", "/libraries/files/everyone's", Authorization=f"Bearer {ADMIN}")[0] == 200


def test_the_operators_libraries(serve, pictures):
    served = serve(admin_key=ADMIN)
    as_admin = {"Authorization": f"Bearer {ADMIN}"}
    said = {"id": "sku-1", "metadata": json.dumps({"price": 3}), "expires": "60"}
    status, item = upload(served, "/libraries/shop", png(pictures[0]), key=ADMIN, **said)
    assert status == 200, item
    assert (item["metadata"], item["height"], item["width"], item["has_bytes"]) == ({"price": 3}, 64, 96, True)
    assert item["expires_at"] == pytest.approx(item["created_at"] + 60, abs=1)
    assert upload(served, "/libraries/shop", png(pictures[0]), key=ADMIN, id="sku-1")[0] == 400
    assert upload(served, "/libraries/shop", png(pictures[1]), "PUT", key=ADMIN, id="none")[0] == 400
    status, changed = upload(served, "/libraries/shop", png(pictures[1]), "PUT", key=ADMIN, id="sku-1")
    assert changed["expires_at"] == item["expires_at"]
    assert (status, changed["height"], changed["metadata"]) == (200, 96, {"price": 3})
    for fields in ({}, {"id": "x", "metadata": "{"}, {"id": "x", "metadata": "3"}, {"id": "x", "expires": "-1"}):
        assert upload(served, "/libraries/shop", png(pictures[0]), key=ADMIN, **fields)[0] == 400
    assert served.json("GET", "/libraries", **as_admin)[1]["data"] == [{"object": "library", "name": "shop"}]
    assert [one["id"] for one in served.json("GET", "/libraries/shop", **as_admin)[1]["data"]] == ["sku-1"]
    assert served.json("GET", "/libraries/shop/sku-1", **as_admin)[1]["id"] == "sku-1"
    status, found = served.json("POST", CHAT, shows({"type": "image", "library": "shop", "id": "sku-1"}))
    assert status == 200, found
    assert found["cache"]["images"][0]["encoder"] != "computed"
    for method in ("GET", "DELETE"):
        assert served.json(method, "/libraries/shop/none", **as_admin)[0] == 404
    assert upload(served, "/libraries/shop", png(pictures[2]), key=ADMIN, id="a/b")[0] == 200
    for name in ("sku-1", "a%2Fb"):
        assert served.json("GET", f"/libraries/shop/{name}", **as_admin)[0] == 200
        assert served.json("DELETE", f"/libraries/shop/{name}", **as_admin)[0] == 200
    assert served.json("GET", "/libraries", **as_admin)[1]["data"] == []
    assert served.json("GET", "/libraries")[0] in (401, 403)


def test_base64_is_little_endian_float32(serve):
    served = serve()
    _, numbers = served.json("POST", "/v1/embeddings", {"input": "a"})
    _, coded = served.json("POST", "/v1/embeddings", {"input": "a", "encoding_format": "base64"})
    found = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(found, numbers["data"][0]["embedding"], atol=1e-6)


@pytest.mark.parametrize("asked", ["embeddings", "rerank", "score", "files"])
@pytest.mark.parametrize("fails", ["once", "always"])
def test_an_engine_that_has_failed_is_found_out(serve, engine, pictures, monkeypatch, asked, fails):
    served, runner, left = serve(), engine.service.device.runner, [True] * (1 if fails == "once" else 1000)

    def breaking(work):
        def breaks(*given):
            if left:
                left.pop()
                raise RuntimeError("the device is gone")
            return work(*given)

        return breaks

    for name in ("last_hidden", "head", "window"):
        monkeypatch.setattr(runner, name, breaking(getattr(runner, name)))
    if asked == "files":
        status = upload(served, "/v1/files", png(pictures[3]), purpose="vision")[0]
    else:
        bodies = {"embeddings": {"input": "x"}, "rerank": {"query": "x", "documents": ["y"]}}
        body = bodies.get(asked, {"queries": "x", "documents": "y"})
        status = served.json("POST", f"/v1/{asked}", body)[0]
    assert status == 500
    assert eventually(lambda: not left or served.ask("GET", "/health")[0] == 503)
    assert served.ask("GET", "/health")[0] == (200 if fails == "once" else 503)
