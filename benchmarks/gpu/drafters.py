"""Every drafter with its shipped weights: same tokens as without drafts, same bits in both
forms."""

from benchmarks.drafters.arms import Arm, arms, is_there
from benchmarks.gpu.device import Device
from benchmarks.gpu.exact import answers, requests, same
from benchmarks.gpu.say import Say
from benchmarks.harness.engines import Bench, load


def run(device: Device, say: Say) -> None:
    asked = requests(2 if device.is_rehearsal else 8)
    wanted: dict[object, list[tuple[list[int], str]]] = {}
    for arm in filter(is_there, arms()):
        if arm.path not in wanted:
            reference = load(arm.path, "model.kernels=torch", "speculation.drafter=none")
            bench = Bench(reference, num_drafts=0, max_rows=len(asked), page_size=64)
            wanted[arm.path] = bench.generate(*asked)
        loaded = load(arm.path, "model.dtype=float32", *_sets(arm, device))
        eager, eager_bits = answers(loaded, asked, arm.depth, is_captured=False)
        captured, captured_bits = answers(loaded, asked, arm.depth, is_captured=True)
        pairs = zip(eager, wanted[arm.path], strict=True)
        as_on_a_cpu = sum(a == b for a, b in pairs) / len(asked)
        forms_equal = eager == captured and same(eager_bits, captured_bits)
        right = forms_equal and as_on_a_cpu == 1
        results = {"as_on_a_cpu": as_on_a_cpu, "forms_equal": forms_equal, "form": loaded.exec_mode}
        say(f"{arm.name}, float32", is_right=right, **results)


def _sets(arm: Arm, device: Device) -> list[str]:
    sets = [] if device.is_rehearsal else ["decode.device=cuda", "model.kernels=triton"]
    sets += [*arm.asks, f"speculation.max_depth={arm.depth}"]
    return sets + ([] if arm.nodes is None else [f"speculation.max_tree_nodes={arm.nodes}"])
