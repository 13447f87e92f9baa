/*
 * railmate's attach gate: an OCI createRuntime hook that lets a container start only when its own pod sandbox
 * holds the claim's network devices.
 *
 *     gate ATTACHED-DIR CLAIM-UID [DRIVER-NAME [NODES]]  < state of the container, as JSON (OCI runtime specification)
 *
 * The driver writes ATTACHED-DIR/CLAIM-UID.SANDBOX-ID when it has attached the devices of the claim to that
 * sandbox, and only then. Exit code 0: the file is there. 1: it is not, or that cannot be told; the runtime
 * then refuses the container and shows the user what is on stderr. 2: wrong arguments.
 *
 * A file that says "host" is for a pod on the host network, whose devices stay on the node. The driver knows such
 * a pod only by what the runtime does not tell (its network namespace), and runtimes leave that out for other
 * reasons too. So here it is looked at: the container must be in the network namespace that this hook runs in.
 *
 * An RDMA device may get other device nodes when it moves into the pod, and those that it had may be another pod's then. A
 * runtime that has read the claim's CDI spec before the move, or has it in its cache, would give the container those. So
 * the spec says for which device nodes it was written (NODES, a word), and so does the second line of the file: where they
 * differ the container is refused, and the runtime reads the new spec for the next one.
 *
 * A container that may start gets its RLIMIT_MEMLOCK raised, because RDMA pins the memory it registers and a container
 * that does not run as root has no other way to more. Here it works without the driver, and whether it works is seen
 * without harm: the runtime itself would refuse the container (runc: "error setting rlimits"). The result is left for
 * the driver beside ATTACHED-DIR, as an empty file called memlock-raised or memlock-refused. The gate opens either way.
 *
 * The annotation DRIVER-NAME/rdma-denied of the container, which the driver gives it, names RDMA devices that other claims
 * may have: where the node has the rdma cgroup controller, the container gets no resource of them. Every hook of a
 * container sees the same annotation, so several claims do not take each other's devices away. What came of it is left
 * as rdma-limited or rdma-unlimited. The gate opens either way.
 *
 * Everything that is not understood keeps the gate closed. The program needs nothing of the host: it is linked
 * statically and reads a bounded amount of input.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rdma_cgroup.h"

#define MAX_STATE (1 << 20) /* bytes of JSON; annotations of an object in the API take 256 KiB at most */
#define MAX_DEPTH 32        /* of nested JSON objects and arrays */
#define MAX_ID 128          /* characters of a sandbox or container id (containerd: 64) or a claim's UID (36) */
#define MAX_DENIED (64 << 10) /* characters of RDMA devices' names (63 each at most) */

static const char *driver = "railmate.dev";

/* The annotations under which containerd and CRI-O give the sandbox's id. */
static const char *const id_keys[] = {"io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"};

static char state[MAX_STATE + 1];
static char sandbox[MAX_ID + 2]; /* one more than allowed, so that a longer one is seen to be too long */
static int sandbox_conflict;
static char container[MAX_ID + 2];
static char denied_key[MAX_ID + 2]; /* the annotation's */
static char denied[MAX_DENIED + 2];
static long pid; /* the container's, in the hook's pid namespace; 0 where the state has none */

struct scanner {
	const char *at, *end;
};

static int refuse(const char *format, ...)
{
	va_list arguments;

	fprintf(stderr, "%s: ", driver);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	return 1;
}

static int peek(struct scanner *s)
{
	while (s->at < s->end && strchr(" \t\r\n", *s->at) && *s->at)
		s->at++;
	return s->at < s->end ? (unsigned char)*s->at : -1;
}

static int take(struct scanner *s, int wanted)
{
	if (peek(s) != wanted)
		return 0;
	s->at++;
	return 1;
}

/* The value of four hexadecimal digits, -1 if they are not. */
static int hex4(const char *digits)
{
	int value = 0;

	for (int i = 0; i < 4; i++) {
		int c = (unsigned char)digits[i];

		if (!isxdigit(c))
			return -1;
		value = value * 16 + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
	}
	return value;
}

/*
 * Reads a string into out (size bytes with the final 0), cut off where it is longer. What is not printable ASCII
 * becomes '?', which is in none of the strings that matter here. Returns 0 for malformed input.
 */
static int string(struct scanner *s, char *out, size_t size)
{
	size_t length = 0;

	if (!take(s, '"'))
		return 0;
	while (s->at < s->end && *s->at != '"') {
		int c = (unsigned char)*s->at++;

		if (c == '\\') {
			if (s->at == s->end)
				return 0;
			c = (unsigned char)*s->at++;
			if (c == 'u') {
				if (s->end - s->at < 4 || (c = hex4(s->at)) < 0)
					return 0;
				s->at += 4;
			} else if (c && strchr("bfnrt", c)) {
				c = '?';
			} else if (!c || !strchr("\"\\/", c)) {
				return 0;
			}
		} else if (c < 0x20) {
			return 0;
		}
		if (length + 1 < size)
			out[length++] = c < 0x20 || c > 0x7e ? '?' : (char)c;
	}
	if (s->at == s->end)
		return 0;
	s->at++;
	out[length] = 0;
	return 1;
}

static void note_sandbox(const char *id)
{
	if (sandbox[0] && strcmp(sandbox, id) != 0)
		sandbox_conflict = 1;
	strcpy(sandbox, id);
}

/*
 * Reads a value. depth counts the objects and arrays around it; path is what the state's members on the way to it
 * are: 0 the state itself, 1 its annotations, -1 anything else. Returns 0 for malformed input.
 */
static int value(struct scanner *s, int depth, int path)
{
	int open = peek(s), close = open == '{' ? '}' : ']';
	char text[MAX_ID + 2];

	if (open == '"')
		return string(s, text, sizeof text);
	if (open != '{' && open != '[') { /* number, true, false, null */
		const char *start = s->at;

		while (s->at < s->end && *s->at && strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", *s->at))
			s->at++;
		return s->at > start;
	}
	if (depth == MAX_DEPTH)
		return 0;
	s->at++;
	if (take(s, close))
		return 1;
	do {
		int inner = -1;

		if (open == '{') {
			if (!string(s, text, sizeof text) || !take(s, ':'))
				return 0;
			if (path == 0 && strcmp(text, "annotations") == 0)
				inner = 1;
			if (path == 0 && strcmp(text, "pid") == 0 && isdigit(peek(s)))
				pid = strtol(s->at, NULL, 10); /* the input ends with a 0 */
			if (path == 0 && strcmp(text, "id") == 0 && peek(s) == '"') {
				if (!string(s, container, sizeof container))
					return 0;
				continue;
			}
			if (path == 1 && strcmp(text, denied_key) == 0 && peek(s) == '"') {
				if (!string(s, denied, sizeof denied))
					return 0;
				continue;
			}
			if (path == 1 && peek(s) == '"' &&
			    (strcmp(text, id_keys[0]) == 0 || strcmp(text, id_keys[1]) == 0)) {
				if (!string(s, text, sizeof text))
					return 0;
				note_sandbox(text);
				continue;
			}
		}
		if (!value(s, depth + 1, inner))
			return 0;
	} while (take(s, ','));
	return take(s, close);
}

/* Whether text can be part of a file name here: letters, digits and, where allowed, dashes. */
static int is_id(const char *text, int dashes)
{
	size_t length = strlen(text);

	return length > 0 && length <= MAX_ID &&
	       strspn(text, dashes ? "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-"
				   : "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") == length;
}

/*
 * Whether the marker says that the pod is on the host network; -1 if that cannot be told. nodes (MAX_ID + 2 bytes) gets
 * its second line, "" where it has none.
 */
static int says_host(const char *marker, char *nodes)
{
	char text[MAX_ID + 8], *line;
	int file = open(marker, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	ssize_t got;

	if (file < 0)
		return -1;
	got = read(file, text, sizeof text - 1);
	close(file);
	if (got < 0)
		return -1;
	text[got] = 0;
	line = strchr(text, '\n');
	nodes[0] = 0;
	if (line && strlen(line + 1) <= MAX_ID)
		strcpy(nodes, line + 1);
	return strncmp(text, "host", 4) == 0;
}

/* Whether the container is in the network namespace of this process. */
static int on_host_network(void)
{
	char path[64];
	struct stat theirs, ours;

	snprintf(path, sizeof path, "/proc/%ld/ns/net", pid);
	return pid > 0 && stat(path, &theirs) == 0 && stat("/proc/self/ns/net", &ours) == 0 &&
	       theirs.st_dev == ours.st_dev && theirs.st_ino == ours.st_ino;
}

/* Leaves the file `name` beside the directory, and removes `other`. */
static void leave(const char *directory, const char *name, const char *other)
{
	char path[PATH_MAX];
	int file;

	if ((size_t)snprintf(path, sizeof path, "%s/../%s", directory, other) < sizeof path)
		unlink(path);
	if ((size_t)snprintf(path, sizeof path, "%s/../%s", directory, name) < sizeof path) {
		file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
		if (file >= 0)
			close(file);
	}
}

/* No limit to the memory that the container's first process may lock; where that is refused, as much as it may have. */
static void raise_memlock(const char *directory)
{
	struct rlimit now, wanted = {RLIM_INFINITY, RLIM_INFINITY};

	if (pid <= 0 || prlimit((pid_t)pid, RLIMIT_MEMLOCK, NULL, &now) != 0)
		return;
	if (prlimit((pid_t)pid, RLIMIT_MEMLOCK, &wanted, NULL) == 0) {
		leave(directory, "memlock-raised", "memlock-refused");
	} else if (errno == EPERM) {
		wanted.rlim_cur = wanted.rlim_max = now.rlim_max;
		prlimit((pid_t)pid, RLIMIT_MEMLOCK, &wanted, NULL);
		leave(directory, "memlock-refused", "memlock-raised");
	}
}

/* Takes from the container what of RDMA it does not have from a claim. */
static void deny_rdma(const char *directory)
{
	if (!*denied || strlen(denied) > MAX_DENIED)
		return; /* what was cut off could name another device */
	if (limit_rdma(pid, container, denied))
		leave(directory, "rdma-limited", "rdma-unlimited");
	else
		leave(directory, "rdma-unlimited", "rdma-limited");
}

int main(int argc, char **argv)
{
	char path[PATH_MAX], nodes[MAX_ID + 2] = "";
	struct scanner s = {state, state};
	struct stat marker;
	size_t length = 0;
	ssize_t got;

	if (argc < 3 || argc > 5) {
		fprintf(stderr, "usage: %s ATTACHED-DIR CLAIM-UID [DRIVER-NAME [NODES]]  (an OCI createRuntime hook)\n",
			argc ? argv[0] : "gate");
		return 2;
	}
	if (argc > 3)
		driver = argv[3];
	if ((size_t)snprintf(denied_key, sizeof denied_key, "%s/rdma-denied", driver) >= sizeof denied_key)
		denied_key[0] = 0;
	if (!is_id(argv[2], 1))
		return refuse("the attach gate was given a malformed claim UID");

	while (length <= MAX_STATE) {
		got = read(STDIN_FILENO, state + length, sizeof state - length);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return refuse("the container's state cannot be read: %s", strerror(errno));
		if (got == 0)
			break;
		length += (size_t)got;
	}
	if (length > MAX_STATE)
		return refuse("the container's state has more than %d bytes; remove large annotations from the pod",
			      MAX_STATE);
	s.end = state + length;
	if (peek(&s) != '{' || !value(&s, 0, 0) || peek(&s) != -1)
		return refuse("the container runtime gave a malformed container state");
	if (!sandbox[0])
		return refuse("the container's state does not name its pod sandbox; the container runtime must be "
			      "containerd or CRI-O");
	if (sandbox_conflict || !is_id(sandbox, 0))
		return refuse("the container's state names its pod sandbox in an unusable way");

	got = snprintf(path, sizeof path, "%s/%s.%s", argv[1], argv[2], sandbox);
	if (got < 0 || (size_t)got >= sizeof path)
		return refuse("the path of the directory of attached claims is too long");
	if (lstat(path, &marker) == 0) {
		int host = S_ISREG(marker.st_mode) ? says_host(path, nodes) : -1;

		if (host < 0)
			return refuse("whether claim %s is attached to this pod cannot be told: %s is no readable regular "
				      "file", argv[2], path);
		if (host && !on_host_network())
			return refuse("the network device of claim %s is not attached to this pod: the container runtime "
				      "named no network namespace for the pod, and the pod is not on the host network. "
				      "Delete the pod; if it comes again, see the container runtime's log on this node.",
				      argv[2]);
		if (argc > 4 && strcmp(argv[4], nodes) != 0)
			return refuse("the device nodes of claim %s have changed since the container runtime read which they "
				      "are: an RDMA device gets other ones when it moves into the pod. The container gets "
				      "the new ones when it is created again, which happens by itself.", argv[2]);
		raise_memlock(argv[1]);
		deny_rdma(argv[1]);
		return 0;
	}
	if (errno != ENOENT)
		return refuse("whether claim %s is attached to this pod cannot be told: %s: %s", argv[2], argv[1],
			      strerror(errno));
	return refuse("the network device of claim %s is not attached to this pod yet (sandbox %.12s): the railmate "
		      "plugin on this node is not connected to the container runtime; the container starts by itself "
		      "once it is. See the railmate pod's log on this node.",
		      argv[2], sandbox);
}
