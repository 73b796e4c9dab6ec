"""Frames of a decode rank go to the latest reader of each session."""

from tandem.core.errors import RankLost
from tandem.core.heartbeat import Heartbeat
from tandem.core.identity import Identity
from tandem.core.request import SequenceUpdate, TokenFrame
from tandem.core.schema import unpack
from tandem.decode_node.service.publisher import FramePublisher
from tandem.decode_node.service.sessions import Sessions
from tandem.runtime.frames import Frame
from tests.waiting import turns

SESSION, OTHER = 7, 8


def no_beat(held: tuple[Identity, ...]) -> Heartbeat:
    raise AssertionError("no heartbeat was sent")


async def test_the_late_end_of_an_old_connection_leaves_the_new_one_its_frames() -> None:
    """A gateway that reconnects is served before the end of its first connection is noticed."""
    sessions = Sessions(lease_s=30.0, clock=lambda: 0.0)
    publisher = FramePublisher(sessions, no_beat)
    heard: dict[str, list[Frame]] = {"old": [], "new": [], "other": []}
    end_old = publisher.subscribe(SESSION, heard["old"].append)
    end_new = publisher.subscribe(SESSION, heard["new"].append)
    publisher.subscribe(OTHER, heard["other"].append)
    end_old()
    identity = Identity("r1")
    sessions.add(SESSION, identity)
    update = SequenceUpdate(identity, (5, 6))
    publisher.publish([update])
    await turns()
    [frame] = heard["new"]
    assert isinstance(frame, bytes) and unpack(TokenFrame, frame) == TokenFrame((update,))
    end_new()
    publisher.publish([update])
    await turns()
    publisher.fail(error := RankLost("stopped"))
    assert [len(frames) for frames in heard.values()] == [0, 1, 1] and heard["other"] == [error]
