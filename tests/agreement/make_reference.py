"""Writes reference.json: what transformers' own `generate` answers, greedily, in float32.

python tests/agreement/make_reference.py
"""

import json
from pathlib import Path

TOKENS = 24
HERE = Path(__file__).parent


def prompts() -> list[str]:
    return [line.replace("\\n", "\n") for line in (HERE / "prompts.txt").read_text().splitlines()]


def main() -> None:
    import torch
    import transformers

    from llmops.build.checkpoint.known_models import bundled_path

    file = bundled_path("smollm2")
    folder = file.parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts():
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            out = model.generate(**ids, do_sample=False, max_new_tokens=TOKENS)
        new = out[0, ids["input_ids"].shape[1] :].tolist()
        answers.append({"prompt": prompt, "input_ids": ids["input_ids"][0].tolist(), "output_ids": new})
        print(repr(prompt), repr(tokenizer.decode(new)))
    source = f"transformers {transformers.__version__}, torch {torch.__version__}, generate(do_sample=False), float32"
    text = json.dumps({"source": source, "tokens": TOKENS, "answers": answers}, ensure_ascii=False, indent=1)
    (HERE / "reference.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
