"""The exactness rule: an emitted token is the reference's argmax, given the emitted prefix.

Teacher forcing needs one forward per answer. A differing token passes only as a near tie: the
reference's float64 top-two margin there is below 1e-4. Near ties are returned.
"""

from pathlib import Path

import torch

from benchmarks.harness import tiny

MARGIN = 1e-4


def near_ties(folder: Path, prompt: list[int], output: list[int]) -> list[str]:
    """Return the near ties at which ``output`` differs from the reference; assert on other
    differences."""
    ids = prompt + output[:-1]
    predicted = tiny.reference_logits(folder, ids)[len(prompt) - 1 :].argmax(-1).tolist()
    if predicted == output:
        return []
    logits = tiny.reference_logits(folder, ids, torch.float64)[len(prompt) - 1 :]
    places = []
    for i, (token, row) in enumerate(zip(output, logits, strict=True)):
        best = int(row.argmax())
        if token == best:
            continue
        top = row.topk(2)
        margin = float(top.values[0] - top.values[1])
        assert margin < MARGIN and token in top.indices.tolist(), (
            f"token {i}: {token} emitted, reference says {best} by {margin:.6f}; "
            f"prompt of {len(prompt)}, output {output}"
        )
        places.append(f"token {i}: {token} for {best}, margin {margin:.2e}")
    return places
