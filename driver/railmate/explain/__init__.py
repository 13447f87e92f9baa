"""What the scheduler's allocator would do with a claim on a node, and why: pure functions of slices and claims.

The rules are those of k8s.io/dynamic-resource-allocation/structured (the "incubating" allocator) with the feature
gates of a default Kubernetes 1.37. tests/component/test_explain_allocator.py asks that package itself.
"""
