/*
 * The rdma controller of a container's cgroup: kernel Documentation/admin-guide/cgroup-v2.rst, section RDMA, and
 * Documentation/admin-guide/cgroup-v1/rdma.rst. The file is the same in both, and takes one device a write.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "rdma_cgroup.h"

#define MAX_NAME 64 /* IB_DEVICE_NAME_MAX, with the final 0 */

/* Whether the cgroup at `place` is the container's alone, and below what this process sees. */
static int is_own(const char *place, const char *id)
{
	return *id && strstr(place, id) != NULL && strstr(place, "/..") == NULL;
}

static int open_limits(const char *root, const char *place)
{
	char path[PATH_MAX];
	int length = snprintf(path, sizeof path, "%s%s/rdma.max", root, place);

	return length > 0 && (size_t)length < sizeof path ? open(path, O_WRONLY | O_CLOEXEC) : -1;
}

/* The file with the limits of the process's cgroup, -1 where there is none. */
static int find_limits(long pid, const char *id)
{
	char line[PATH_MAX];
	FILE *file;
	int found = -1;

	snprintf(line, sizeof line, "/proc/%ld/cgroup", pid);
	file = fopen(line, "re");
	if (file == NULL)
		return -1;
	while (found < 0 && fgets(line, sizeof line, file) != NULL) {
		char *controllers = strchr(line, ':'), *place = controllers ? strchr(controllers + 1, ':') : NULL;

		if (place == NULL)
			continue;
		*place++ = 0;
		controllers++;
		place[strcspn(place, "\n")] = 0;
		if (!is_own(place, id))
			continue;
		if (strcmp(controllers, "rdma") == 0) {
			found = open_limits("/sys/fs/cgroup/rdma", place);
		} else if (!*controllers) { /* version 2, alone or beside version 1 */
			found = open_limits("/sys/fs/cgroup", place);
			if (found < 0)
				found = open_limits("/sys/fs/cgroup/unified", place);
		}
	}
	fclose(file);
	return found;
}

int limit_rdma(long pid, const char *id, const char *devices)
{
	int file = pid > 0 ? find_limits(pid, id) : -1, done = file >= 0;

	while (done && *(devices += strspn(devices, " "))) {
		size_t length = strcspn(devices, " ");

		/* ENODEV: the device has gone since it was named */
		if (length < MAX_NAME &&
		    dprintf(file, "%.*s hca_handle=0 hca_object=0\n", (int)length, devices) < 0 && errno != ENODEV)
			done = 0;
		devices += length;
	}
	if (file >= 0)
		close(file);
	return done;
}
