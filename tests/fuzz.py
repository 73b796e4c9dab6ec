"""Malformed and hostile client messages, drawn from a seeded source."""

import math
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tandem.cluster.proto import tandem_pb2 as pb

NAMES = ("a", "b", "c", "d")
"""Request ids; few, so that requests collide."""
TEXTS = (
    "",
    "a",
    "é😀",
    "\x00",
    "def f(x):\n",
    " ",
    "x y",
    "<think>",
    "\u202e",
    "a" * 129,
    "z" * 5000,
)
INTS = (0, 1, 2, -1, 7, 20, 21, 2047, 2048, 8192, 2**31 - 1, -(2**31))
LONG_INTS = (*INTS, 2**63 - 1, -(2**63), 2**40)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-5, 1e-9, 2.0, 100.0, 101.0, 1e308, 5e-324, math.inf,
          -math.inf, math.nan)  # fmt: skip
COUNTS = (0, 1, 2, 3, 33, 1025, 9000)
_Kind = FieldDescriptor
_VALUES: dict[int, tuple[Any, ...]] = {
    _Kind.CPPTYPE_INT32: INTS,
    _Kind.CPPTYPE_INT64: LONG_INTS,
    _Kind.CPPTYPE_DOUBLE: FLOATS,
    _Kind.CPPTYPE_BOOL: (False, True),
    _Kind.CPPTYPE_STRING: TEXTS,
    _Kind.CPPTYPE_ENUM: (0, 1, 2, 3, 4, 5, -1, 2**31 - 1),
}


def ordinary(random: Random) -> pb.GenerateRequest:
    """Return a random request that can be answered quickly."""
    message = pb.GenerateRequest(sampling=pb.Sampling(max_tokens=random.randint(1, 6)))
    message.sampling.n = random.choice((0, 0, 0, 2))
    message.sampling.temperature = random.choice((0.0, 0.0, 0.8))
    if random.random() < 0.3:
        message.request_id = random.choice(NAMES)
    if random.random() < 0.3:
        message.sampling.stop.extend(random.choices("abcde \n", k=2))
    if random.random() < 0.2:
        message.sampling.logprobs = random.randint(0, 20)
    if random.random() < 0.5:
        message.text = random.choice(("def f(", "é😀 the", "\n\n", "\x00"))
    else:
        message.token_ids.ids.extend(random.choices(range(4, 2048), k=random.randint(1, 40)))
    return message


def wild(random: Random) -> pb.GenerateRequest:
    """Return an ordinary request in which a few fields hold any value that their type allows."""
    message = ordinary(random)
    for _ in range(random.randint(1, 3)):
        part: Message = random.choice((message, message.sampling, message.speculation))
        _set(random, part, random.choice(part.DESCRIPTOR.fields))
    return message


def _set(random: Random, part: Message, field: FieldDescriptor) -> None:
    count = random.choice(COUNTS)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = getattr(part, field.name)
        entries.update({random.choice((i, -i)): random.choice(FLOATS) for i in range(count)})
    elif field.message_type is not None:
        getattr(part, field.name).SetInParent()
    elif field.is_repeated:
        values = _VALUES[field.cpp_type]
        getattr(part, field.name).extend(
            random.choices(
                (5, *values) if field.cpp_type == _Kind.CPPTYPE_INT32 else values,
                k=min(count, 9000),
            )
        )
    else:
        setattr(part, field.name, random.choice(_VALUES[field.cpp_type]))


def mutated(random: Random, data: bytes) -> bytes:
    """Change, drop, insert or repeat some of the bytes."""
    out = bytearray(data)
    for _ in range(random.randint(1, 6)):
        at = random.randint(0, len(out))
        match random.randrange(5):
            case 0 if out:
                out[at % len(out)] ^= 1 << random.randrange(8)
            case 1:
                out[at:at] = random.randbytes(random.randint(1, 8))
            case 2:
                del out[at : at + random.randint(1, 8)]
            case 3:
                out[at:at] = out[at : at + random.randint(1, 16)]
            case _:
                out[at : at + 1] = b"\xff"
    return bytes(out)
