"""Test the container image in pods that are made from the manifests of deploy/.

The image is built and started with the users, limits, read-only roots and NetworkPolicies of the
manifests. Requests are sent with the commands of deploy/README.md.

Run it by ``make image-test`` or ``python -m tests.image``. Kubernetes itself, the operator and GPUs
are not tested here.
"""
