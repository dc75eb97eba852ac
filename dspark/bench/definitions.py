"""What each figure of a serving benchmark means; the formulas are `sglang.bench_serving`'s."""

__all__ = ["DEFINITIONS", "SYMBOLS", "definitions"]

SYMBOLS = (
    "For request i: s is the moment just before its POST, f the first chunk with text, e the last "
    "chunk, n its output tokens (the server's count). Wall: from the first POST until the server's "
    "own figures are read behind the last answer. Every run begins with one warm-up request "
    "of at most 32 tokens, which no figure contains."
)

DEFINITIONS = {
    "mean TPOT": "(e - f) / (n - 1) of requests with n > 1, mean over requests, which all count "
    "alike. Not the time of a step.",
    "median TPOT": "The same, median; below the mean where acceptance is skewed.",
    "output throughput": "Sum of n over the wall: waiting for first tokens and the client's own "
    "gaps are inside.",
    "peak output throughput": "Most tokens in a one-second bucket; buckets begin at the first "
    "start, the tokens of a chunk are spread over the gap before it. Worth +-5%.",
    "accept length": "Tokens a verify step adds, the target's own included, over all steps since "
    "the flush behind the warm-up, that is, of this run. The prefill's token is no step.",
    "mean step": "One propose, verify, commit step by the server's clock; not TPOT times accept "
    "length. p50, p90 and p99: over steps.",
    "ceiling": "(proposals of a step + 1) / mean step. A run whose output throughput lies above it "
    "has a wrong clock or counter, and ends with exit code 1.",
    "prompt tokens": "Of all prompts, by the server's count.",
    "reused prompt tokens": "Of these, tokens that the server did not read again, since an earlier "
    "prompt of the run began with them: TTFT is shorter by their time. 0 with "
    "`dspark serve --prefix-cache-bytes 0`.",
    "mean TTFT": "f - s: HTTP, queue, prefill, and the first step where a server sends nothing "
    "before.",
    "mean ITL": "Gap between two chunks, split evenly over the tokens of the later one; over all "
    "tokens.",
    "mean E2E": "e - s.",
    "total throughput": "Prompt and output tokens over the wall.",
    "concurrency": "Sum of e - s over the wall; 1 says that one request was always under way.",
    "accept rate by slot": "Share of the steps that kept slot k among those that kept all slots "
    "before it; survival: that kept slots 0..k among those that proposed slot k.",
    "chat": "Workload: each prompt through the model's chat template, ended by the model.",
    "prompts": "Workload: the text of each prompt as it is, no template, ended by the model.",
    "random": "Workload, SGLang's `random`: first turns, shuffled, each repeated or cut to exactly "
    "its number of ids, no template, EOS ignored, greedy. Lengths are drawn from [length * ratio, "
    "length]; the same seed draws SGLang's. Ids are sent, not text, so that the server counts the "
    "same. Where there are fewer texts than requests, a text comes back one id further on. Tiled "
    "text makes a model copy, so that its accept length is above that of any human prompt.",
    "compare": "Every request is sent to both sides, one right after the other, the first side "
    "alternating. Interval: 95% percentile bootstrap over the pairs (2,000 draws). Ratio: base "
    "over measured for times, measured over base for accept length: above 1 is better. Throughput "
    "of a side: its tokens over its own time under way; its peak shares the seconds with the "
    "other side.",
}
"""By the name of the row."""


def definitions() -> str:
    """All of them as text."""
    return "\n".join([SYMBOLS, "", *(f"{name}: {text}" for name, text in DEFINITIONS.items())])
