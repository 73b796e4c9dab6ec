"""The weights that all ranks of a cluster have in common. No Ray in it."""


class ClusterWeights:
    """Digest of the weights that all ranks of a cluster must hold.

    The first rank that holds weights determines it, and it stays while any rank holds weights. Once
    all ranks have ended, the next rank determines it again. A stopped cluster can therefore start
    again with a changed checkpoint in the same folder.
    """

    def __init__(self) -> None:
        self.digest_by_rank: dict[object, str] = {}
        """Digest of each rank's weights, until its process ends."""

    @property
    def digest(self) -> str:
        """Digest of the cluster's weights, "" while no rank holds any."""
        return next(iter(self.digest_by_rank.values()), "")

    def record(self, rank: object, digest: str) -> bool:
        """Record the digest of a rank's weights, "" if it holds none yet.

        Returns False, and records nothing, if the cluster has other weights.
        """
        is_same = digest in ("", self.digest or digest)
        if digest and is_same:
            self.digest_by_rank[rank] = digest
        return is_same
