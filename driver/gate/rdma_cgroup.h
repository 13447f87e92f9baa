#ifndef RDMA_CGROUP_H
#define RDMA_CGROUP_H

/*
 * Allows the container no resource of the RDMA devices named in `devices` (separated by spaces), by the rdma controller
 * of its own cgroup. `pid` is one of its processes, `id` the container's: a cgroup whose path does not name it may be
 * others' too, and is left alone. Returns 1 where the limits are set, 0 where the node has no such controller for the
 * container, or the kernel refuses them.
 */
int limit_rdma(long pid, const char *id, const char *devices);

#endif
