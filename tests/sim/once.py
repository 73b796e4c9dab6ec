"""Seeds and faults that failed before a bug was fixed."""

from tests.sim.fault import Fault
from tests.sim.run import Result, run_seed

_DEAD = "30,kill rank,0,1", "30.1,kill rank,0,1"
ONCE = {
    "the clock is set back while no rank lives": (
        4,
        *("29,clock back,0,1", *_DEAD, "30.2,kill controller,0,1"),
    ),
    "a controller dies while a rank is replaced": (
        1,
        *("30,kill rank,2,1", "31.7,kill controller,0,1"),
    ),
    "a controller cannot adopt yet": (
        1,
        *("30,lose head,0,3", "30.1,kill controller,0,1"),
    ),
    "a controller dies over stopping a gang, whose rank hears of it later": (
        558,
        *("58.83254,drain,342446578,3", "58.993134,stop rank,841800998,20"),
        "63.610277,kill controller,932901726,3",
    ),
    "Ray does not answer for long as a gang is to be begun": (
        1623,
        *("59.764472,lose head,253668167,20", "61.339611,lose calls,513615956,1"),
        *("61.946886,kill gateway,154497929,3", "62.487826,lose calls,728363350,1"),
        "68.42748,drain,210687153,3",
    ),
    "rooms that could not be given back are in the way of the next one": (
        1927,
        *("38.057462,kill controller,486173533,20", "38.501138,stop rank,408388418,3"),
        *("39.807281,lose calls,653971327,1", "60.686741,lose head,467509040,20"),
        *("64.393012,kill rank,210936088,7", "64.622748,drain,365539859,7"),
    ),
    "the call that a new rank begins to load by is lost": (
        2401,
        *("12.055888,kill rank,693442863,1", "23.092088,drain,593293184,7"),
        *("27.513083,stop gateway,587498503,20", "31.321230,lose calls,124557214,7"),
        *("36.397618,kill rank,707201075,3", "61.572941,kill rank,489106494,20"),
    ),
    "who is suspected of a death that nobody tells of meets a step that fails": (
        3060,
        *("50.622249,kill rank,790379043,3", "53.560587,kill rank,543353280,20"),
        *("57.541489,fail step,345751100,7", "59.062496,kill rank,446966963,3"),
        "59.127119,kill controller,17239106,20",
    ),
    "lives end while a gateway that begins warms their pairs": (
        5418,
        *("43.326024,lose calls,100354958,20", "53.094590,kill gateway,309963378,1"),
        "56.418843,kill gateway,873040592,3",
    ),
    "Ray's head is away while a rank is replaced, and the others of its gang are well": (
        10176,
        *("12.661699,kill rank,313095967,20", "13.138848,lose head,850104747,3"),
    ),
    "an offer of a life that is over comes after one of the next": (
        131,
        *("15.133166,stop rank,688084202,20", "26.040961,lose calls,148510063,20"),
        *("27.246710,kill controller,1002797765,1", "29.602086,kill gateway,352672874,3"),
        "30.033429,kill rank,345224974,3",
    ),
    "a rank restarts over other weights, then the controller does": (
        3,
        *("29,move link,0,20", "30,kill rank,2,1", "36,kill controller,0,1"),
    ),
    "two ranks restart over other weights, then a gateway does": (
        2,
        *("29,move link,0,20", "30,kill rank,0,1", "31,kill rank,5,1", "38,kill gateway,0,1"),
    ),
}
"""Cases by the bug that they found."""


def run_once(what: str) -> Result:
    seed, *faults = ONCE[what]
    return run_seed(seed, [Fault.of(one) for one in faults])
