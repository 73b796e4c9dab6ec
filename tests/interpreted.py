"""Speed up Triton's interpreter by preparing ``triton.language`` once for each launch.

The interpreter of Triton 3.6 and 3.7 prepares it in every call of a function of a kernel. It also
builds a table of numpy types whenever it reads one. Together these take half of the time of our
kernels' tests and have no other effect.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from triton.runtime import interpreter


def prepare_once_a_launch() -> None:
    """Patch the interpreter in this process."""
    prepare: Callable[[Any], Any] = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    language = interpreter.tl, interpreter.tl.core
    read_type = interpreter._get_np_dtype
    known_type = cache(read_type)
    prepared: set[frozenset[int]] = set()

    def prepare_once(function: Any) -> Any:
        found = {id(value) for value in function.__globals__.values()}
        modules = frozenset(id(module) for module in language if id(module) in found)
        if modules in prepared:
            return None
        prepared.add(modules)
        return prepare(function)

    def numpy_type(kind: Any) -> Any:
        is_pointer = isinstance(kind.scalar, interpreter.tl.pointer_type)
        return read_type(kind) if is_pointer else known_type(kind.scalar)

    def launch_prepared(executor: Any, *args: Any, **named: Any) -> None:
        prepared.clear()
        launch(executor, *args, **named)

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_prepared
    interpreter._get_np_dtype = numpy_type
