"""Fixed prompts of the export check, for checkpoints whose trainer recorded none."""

from typing import Any

__all__ = ["fixed_prompts"]

_TEXTS = (
    "What is 17 * 23? Explain each step.",
    "Write a Python function that reverses a string, with a short docstring.",
    "A shop sells pens at 3 for 2 dollars. How much do 24 pens cost? Show your work.",
    "List five facts about the planet Jupiter.",
    "Write a short, polite email that asks a colleague to move a meeting to Friday.",
    "Explain in simple words why the sky is blue.",
    "Give a regular expression that matches a date such as 2024-03-01 and explain it.",
    "Tell a short story about a lighthouse keeper and a lost boat.",
)


def fixed_prompts(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of eight user turns, in the tokenizer's chat format if it has one."""
    if not tokenizer.chat_template:
        return tuple(tuple(tokenizer.encode(text)) for text in _TEXTS)
    return tuple(
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        )
        for text in _TEXTS
    )
