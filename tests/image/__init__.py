"""The image as pods of deploy/: built, begun with the manifests' own users, limits and read-only
roots, behind their NetworkPolicies, and asked with the commands that deploy/README.md has.

``python -m tests.image`` is ``make image-test``. Not here: Kubernetes, the operator, GPUs.
"""
