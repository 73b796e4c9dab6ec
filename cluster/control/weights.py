"""The weights that all ranks of a cluster have in common. No Ray in it."""


class ClusterWeights:
    """Digest of the weights of a cluster, known from the ranks that hold them.

    The first rank that holds weights decides. If no such rank is left, the next one decides: a
    cluster whose ranks have all ended serves whatever lies under its path then.
    """

    def __init__(self) -> None:
        self.digest_by_rank: dict[object, str] = {}
        """Digest of each rank's weights, until its process ends."""

    @property
    def digest(self) -> str:
        """Digest of the cluster's weights, "" as long as no rank holds any."""
        return next(iter(self.digest_by_rank.values()), "")

    def record(self, rank: object, digest: str) -> bool:
        """Note what a rank holds, "" if nothing yet. Return False, and note nothing, if the cluster
        has other weights."""
        is_same = digest in ("", self.digest or digest)
        if digest and is_same:
            self.digest_by_rank[rank] = digest
        return is_same
