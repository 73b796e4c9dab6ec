"""Chaos: a cluster of real processes on machines of its own, faults again and again, and every
answer compared with a reference.

Each machine is a network namespace on one bridge (``tests/pods.py``): a head, nodes with raylets,
two gateways, and a client. ``machines.py`` begins them, and again what has ended; ``asker.py``
asks, in the client's, as anybody would; ``faults.py`` is what goes wrong, ``controllers.py`` where
it is they that die, beside lost, doubled and late messages from within (``tests/faults``);
``report.py`` compares and tells. Needs root.

    python -m tests.chaos [--minutes 20] [--controllers] [--seed N]
"""
