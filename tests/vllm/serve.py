"""One start of vLLM, in its own environment: `python serve.py JOB.json ANSWER.json`.

Knows vLLM and nothing of specpipe, whose class vLLM imports itself where a job names it.

Job: `model` (directory), `prompts` (lists of ids), `max_tokens`, `speculative_config` (or null). Answer: `version`, and
for each prompt `token_ids`, `finish_reason` and `metrics`, vLLM's own of speculation (or null).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job: Path, answer: Path) -> None:
    import vllm

    asked = json.loads(job.read_text(encoding="utf-8"))
    engine = vllm.LLM(
        model=asked["model"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=2,
        enforce_eager=True,
        **(_speculating(asked["speculative_config"]) if asked["speculative_config"] else {}),
    )
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    settings = vllm.SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"])
    outputs = [request.outputs[0] for request in engine.generate(prompts, settings)]
    content = {"version": vllm.__version__, "answers": [_record(output) for output in outputs]}
    answer.write_text(json.dumps(content), encoding="utf-8")


def _speculating(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM keeps metrics of speculation only where there is any."""
    return {"speculative_config": config, "disable_log_stats": False, "per_request_spec_decode_metrics": "detailed"}


def _record(output: Any) -> dict[str, Any]:
    metrics = getattr(output, "spec_decode_metrics", None)
    return {
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "metrics": None if metrics is None else metrics.to_dict(),
    }


if __name__ == "__main__":  # vLLM starts its workers from this file too
    main(Path(sys.argv[1]), Path(sys.argv[2]))
