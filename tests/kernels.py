"""The kernels of this machine's processor; the first use compiles them."""

from functools import cache

from model.kernels.build import built
from model.kernels.native import Native


@cache
def native() -> Native:
    return Native(built())
