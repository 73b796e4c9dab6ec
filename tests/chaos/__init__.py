"""Chaos test: a cluster of real processes, random faults, and a check of every answer.

Each machine is a network namespace on one bridge (``tests/pods.py``): a head, nodes with raylets,
two gateways, and two client machines. Run it as root.

    python -m tests.chaos [--minutes 20] [--controllers] [--seed N]

Modules:

- ``machines.py`` starts the machines, and restarts those that have ended.
- ``asker.py`` sends requests from a client machine, with the client's default settings.
- ``faults.py`` injects faults into processes, machines and the network between them.
- ``controllers.py`` kills controllers instead.
- ``tests/faults`` loses, doubles and delays messages from inside the processes.
- ``report.py`` compares answers with the reference and reports the figures.
"""
