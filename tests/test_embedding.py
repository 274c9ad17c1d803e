"""Vectors of inputs and scores of documents, against transformers, together and one by one, from caches and not."""

import asyncio
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helper import ALONE, SIZES, Oracle, compilations, user
from vlcache_jax import LLM, AsyncLLM, RequestError
from vlcache_jax.convert.stream import convert
from vlcache_jax.inputs.retrieval import EMBEDDING_INSTRUCTION, punctuated
from vlcache_jax.models.registry import find_name
from vlcache_jax.testing import make_checkpoint

SYSTEM = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def directory(request, tmp_path_factory):
    """As the smaller and the larger one of the published sizes, with tokens for yes and no."""
    return make_checkpoint(
        tmp_path_factory.mktemp("embedder") / "model", "qwen3_vl", seed=5,
        tie_word_embeddings=request.param, corpus=["yes", "no"] * 50,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(directory, **SIZES | {"buckets": ALONE}) as engine:
        yield engine


@pytest.fixture
def empty(llm):
    llm.reset_mm_cache()
    return llm


@pytest.fixture(scope="module")
def oracle(load_oracle, directory, llm):
    return Oracle(load_oracle(directory), llm)


@pytest.fixture(scope="module")
def pictures(textured_image):
    return [textured_image(64 + 32 * i, 160 - 32 * i, i) for i in range(4)]


def part(picture):
    return {"type": "image", "image": picture}


def vectors(outputs):
    return np.stack([output.outputs.embedding for output in outputs])


def test_prompts_have_the_published_forms(llm, pictures):
    def texts(*args, **kwargs):
        outputs = llm.embed(*args, use_tqdm=False, **kwargs)
        return [llm.get_tokenizer().decode(output.prompt_token_ids) for output in outputs]

    default = "Represent the user's input."
    assert texts("a cat") == [SYSTEM.format(default, "a cat")]
    assert texts("a cat", instruction=" Find cats ") == [SYSTEM.format("Find cats.", "a cat")]
    assert texts("") == texts([[]]) == [SYSTEM.format(default, "NULL")]
    [found] = texts([[part(pictures[0]), "which?"]])
    assert found.replace("<|image_pad|>", "") == SYSTEM.format(default, PICTURE + "which?").replace("<|image_pad|>", "")
    own = [{"role": "system", "content": "Be terse."}, *user("cat")]
    assert texts(own) == texts([own]) == [SYSTEM.format("Be terse.", "cat")]
    assert texts(user("cat"), instruction="Find.") == [SYSTEM.format("Find.", "cat")]
    assert texts({"prompt": "as it is"}) == ["as it is"]
    # What clients of vLLM send: an assistant's turn that is empty and open is the published form.
    empty = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    for turn in (empty, {"role": "assistant", "content": ""}):
        assert texts({"messages": [*own, turn], "continue_final_message": True}) == texts(own)
    assert texts({"messages": user("cat"), "add_generation_prompt": True}) == texts(user("cat"))
    closed = "<|im_start|>assistant\n"
    [without] = texts({"messages": user("cat"), "add_generation_prompt": False})
    assert without + closed == texts(user("cat"))[0]
    [shut] = texts({"messages": [*own, empty], "add_generation_prompt": False})
    assert shut == texts(own)[0] + "<|im_end|>\n"
    assert [punctuated(text) for text in ("a", "a?", "找", "找。", " ")] == ["a.", "a?", "找.", "找。", ""]


def test_vectors_are_the_librarys(llm, oracle, pictures):
    inputs = [
        "a cat",
        part(pictures[0]),
        [part(pictures[1]), "what is it?"],
        ["two: ", part(pictures[2]), part(pictures[3])],
    ]
    outputs = llm.embed(inputs, use_tqdm=False)
    for output, given in zip(outputs, inputs, strict=True):
        content = given if isinstance(given, list) else [given]
        own = [{"role": "system", "content": "Represent the user's input."}, {"role": "user", "content": content}]
        expected = oracle.last_hidden(llm.service.renderer.from_conversation(own))
        np.testing.assert_allclose(output.outputs.embedding, expected / np.linalg.norm(expected), atol=2e-5, rtol=0)
        assert output.outputs.embedding.dtype == np.float32
        assert output.outputs.hidden_size == len(expected)
        # The first ones alone are as long as 1, too.
        [cut] = llm.embed([given], dimensions=16, use_tqdm=False)
        np.testing.assert_allclose(cut.outputs.embedding, expected[:16] / np.linalg.norm(expected[:16]), atol=2e-5)
    order = np.argsort(vectors(outputs) @ vectors(outputs)[0])
    assert order[-1] == 0
    json.dumps(outputs[1].to_dict())


def test_together_as_one_by_one(empty, pictures):
    inputs = [part(picture) for picture in pictures] + ["a", "b c", [part(pictures[0]), "and text"]]
    alone = []
    for given in inputs:
        empty.reset_mm_cache()
        alone.append(vectors(empty.embed([given], use_tqdm=False))[0])
    empty.reset_mm_cache()
    np.testing.assert_allclose(vectors(empty.embed(inputs * 3, use_tqdm=False)), np.stack(alone * 3), atol=1e-5)


def test_a_repeat_computes_its_last_token(empty, pictures):
    given = [part(pictures[3]), "what is it, exactly, and what stands beside it on the left side of all that is there?"]
    [first] = empty.embed([given], use_tqdm=False)
    [again] = empty.embed([given], use_tqdm=False)
    assert first.cache.images[0].encoder == "computed"
    assert again.cache.images[0].kv == "kv_pool"
    assert again.num_cached_tokens > len(pictures[3]) // 32
    np.testing.assert_allclose(again.outputs.embedding, first.outputs.embedding, atol=1e-5)
    assert again.metrics.ttft > 0
    # An answer begins where an embedding ended, and the other way round.
    [answer] = empty.chat(
        [{"role": "system", "content": "Represent the user's input."}, {"role": "user", "content": given}],
        use_tqdm=False,
    )
    assert answer.cache.images[0].kv == "kv_pool"


@pytest.mark.parametrize("reuse", ["off", "full", 0.5])
def test_other_ways_of_reuse(empty, pictures, reuse):
    given = [part(pictures[2]), "?"]
    [cold] = empty.embed([given], reuse="off", use_tqdm=False)
    empty.embed([["other words: ", part(pictures[2])]], reuse=reuse, use_tqdm=False)
    [found] = empty.embed([given], reuse=reuse, use_tqdm=False)
    alike = float(found.outputs.embedding @ cold.outputs.embedding)
    assert alike > 0.5
    if reuse == "off":
        assert alike == pytest.approx(1, abs=1e-5)


def test_scores_are_the_librarys(llm, oracle, pictures):
    query, documents = ["find ", part(pictures[0])], ["a cat", part(pictures[1]), ["two: ", part(pictures[2])], ""]
    found = llm.rerank(query, documents, instruction="Find it", use_tqdm=False)
    known = llm.get_tokenizer().get_vocab()
    head = oracle.model.lm_head.weight.detach().float().numpy()
    expected = []
    for document in documents:
        content = [f"<Instruct>: Find it<Query>:{query[0]}", query[1], "\n<Document>:"]
        content += document if isinstance(document, list) else [document or "NULL"]
        own = [{"role": "system", "content": JUDGE}, {"role": "user", "content": content}]
        prompt = llm.service.renderer.from_conversation(own)
        assert prompt.text.startswith(
            f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n<Instruct>: Find it<Query>:find "
        )
        logits = head @ oracle.last_hidden(prompt)
        expected.append(1 / (1 + np.exp(logits[known["no"]] - logits[known["yes"]])))
    assert [one.index for one in found] == np.argsort(expected)[::-1].tolist()
    np.testing.assert_allclose([one.score for one in found], sorted(expected, reverse=True), atol=2e-5)
    assert llm.rerank(query, documents, use_tqdm=False)[0].score != found[0].score
    json.dumps(found[0].to_dict())


def test_a_page_behind_twenty_queries_is_encoded_once(empty, pictures):
    before = empty.cache.stats()
    for i in range(20):
        [found] = empty.rerank(f"query {i}", [part(pictures[1])], reuse=0.2, use_tqdm=False)
        assert found.cache.images[0].encoder == ("computed" if i == 0 else found.cache.images[0].encoder)
        assert i == 0 or found.cache.images[0].encoder != "computed"
        assert i == 0 or found.cache.images[0].match == "approximate"
    assert empty.cache.stats().encoder_hits == before.encoder_hits + 19


@pytest.mark.slow
def test_nothing_compiles_after_warmup(directory, pictures):
    with LLM(directory, **SIZES) as engine:
        engine.warmup(verbose=False)
        engine.rerank("a", ["b"], use_tqdm=False)  # reads two rows of the head, once
        with compilations() as found:
            engine.embed(["a", part(pictures[0]), [part(pictures[0]), "b" * 400]] * 4, use_tqdm=False)
            engine.rerank("a", ["b", part(pictures[0])], use_tqdm=False)
        assert not found


def test_what_is_wrong_is_said(llm, pictures, checkpoints):
    for given, message in (
        (3, "^inputs must be a string, a part of a message, or a list, got int$"),
        ([3], r"^inputs\[0\] must be a string, a part of a message or a list of parts, got 3$"),
        ([[{"type": "sound"}]], r"inputs\[0\]"),
        ([part("there/is/none.png")], r"inputs\[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.embed(given, use_tqdm=False)
    for dimensions in (0, 65, True, 1.5):
        with pytest.raises(ValueError, match=r"^dimensions must be an integer from 1 to 64 or None, got "):
            llm.embed("a", dimensions=dimensions)
    with pytest.raises(ValueError, match=r"^instruction must be"):
        llm.embed("a", instruction=3)
    for given in ({"prompt": "a"}, [{"role": "system", "content": "b"}, *user("a")]):
        with pytest.raises(ValueError, match=r"instruction cannot be combined with .* inputs: "):
            llm.embed(given, instruction="Find")
    empty = {"role": "assistant", "content": ""}
    for given in ([*user("a"), empty], {"messages": [*user("a"), empty], "continue_final_message": False}):
        with pytest.raises(
            ValueError, match=r"inputs must not end with an assistant's turn that is empty and closed: "
        ):
            llm.embed(given, use_tqdm=False)
    for given, message in (
        (
            {"messages": user("a"), "speed": 3},
            r"inputs: unknown field 'speed'; expected one of messages, chat_template, ",
        ),
        ({"messages": [{"content": "a"}]}, r"inputs messages\[0\] must have the role "),
        (
            {"messages": [*user("a"), empty], "continue_final_message": True, "add_generation_prompt": True},
            r"inputs add_generation_prompt and continue_final_message are mutually exclusive",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            llm.embed(given, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^query must be"):
        llm.rerank(3, ["a"])
    outputs = llm.embed(["a", 3, "b" * 5000], on_error="return", use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, False]
    assert np.isnan(outputs[1].outputs.embedding).all()
    assert "max_model_len" in outputs[2].error
    ranked = llm.rerank("a", [3, "b"], on_error="return", use_tqdm=False)
    assert [one.index for one in ranked] == [1, 0]
    assert np.isnan(ranked[1].score)


def test_without_yes_and_no(checkpoints):
    with LLM(checkpoints("qwen3_vl-tied"), **SIZES) as engine, pytest.raises(ValueError, match="tokens yes and no"):
        engine.rerank("a", ["b"], use_tqdm=False)


def test_requests_that_come_one_by_one(llm, empty, pictures):
    inputs = ["a", part(pictures[0]), [part(pictures[1]), "b"], user("c", pictures[0])]
    expected = vectors(llm.embed(inputs, use_tqdm=False))
    ranked = llm.rerank("a", [part(pictures[0]), "b", "c"], use_tqdm=False)
    engine = AsyncLLM(llm.service)

    async def asked():
        outputs = await asyncio.gather(*(engine.embed(one, dimensions=None) for one in inputs))
        found = await engine.rerank("a", [part(pictures[0]), "b", "c"])
        with pytest.raises(RequestError, match=r"^input must be a string"):
            await engine.embed(3)
        with pytest.raises(RequestError, match=r"^documents\[1\] must be a string"):
            await engine.rerank("a", ["b", 3])
        with pytest.raises(ValueError, match=r"^request_id must be a non-empty string"):
            await engine.embed("a", "")
        task = asyncio.ensure_future(engine.embed("a" * 300, "mine"))
        await asyncio.sleep(0)
        await engine.abort("mine")
        with pytest.raises(RequestError, match="aborted"):
            await task
        assert (await engine.embed("a", "mine")).request_id == "mine"
        return outputs, found

    outputs, found = asyncio.run(asked())
    np.testing.assert_allclose(vectors(outputs), expected, atol=1e-5)
    assert [one.index for one in found] == [one.index for one in ranked]
    np.testing.assert_allclose([one.score for one in found], [one.score for one in ranked], atol=1e-5)


@pytest.mark.slow
def test_a_model_without_an_output_head_embeds(tmp_path, load_oracle, pictures, caplog):
    """As Qwen3-VL-Embedding-8B, whose configuration speaks of a head that its files do not have."""
    whole = make_checkpoint(tmp_path / "whole", "qwen3_vl", seed=6)
    bare = tmp_path / "bare"
    shutil.copytree(whole, bare)
    tensors = load_file(bare / "model.safetensors")
    assert tensors.pop("lm_head.weight") is not None
    save_file(tensors, bare / "model.safetensors", {"format": "pt"})
    report = convert(bare, tmp_path / "converted", verify=True)
    given = [part(pictures[0]), "what is it?"]
    for directory in (bare, report.directory):
        caplog.clear()
        with LLM(directory, **SIZES) as llm:
            [output] = llm.embed([given], use_tqdm=False)
            oracle = Oracle(load_oracle(whole), llm)
            own = [{"role": "system", "content": EMBEDDING_INSTRUCTION}, {"role": "user", "content": given}]
            expected = oracle.last_hidden(llm.service.renderer.from_conversation(own))
        np.testing.assert_allclose(output.outputs.embedding, expected / np.linalg.norm(expected), atol=2e-5, rtol=0)
        assert ("has no output head" in caplog.text) == (directory == bare)
    assert find_name("qwen3-vl-embedding-8b") == find_name("Qwen3-VL-Reranker-8B") == "Qwen3-VL-8B"
