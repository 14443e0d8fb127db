"""Tokens that vLLM continues prompts with: `python -m support.vllm_generate JSON` prints them as one line of JSON."""

import json
import sys
from typing import Any

MARK = "TOKENS "


def main(settings: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    prompts, new = settings.pop("prompts"), settings.pop("new")
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=True, **settings)
    sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, detokenize=False)
    made = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    print(MARK + json.dumps([list(m.outputs[0].token_ids) for m in made]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
