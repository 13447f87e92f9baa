/*
 * probe SOCKET PATH [SECONDS]: asks an HTTP server on a unix socket for PATH.
 *
 * The kubelet runs it for the driver's probes. Exit code 0: the answer was 2xx. 1: it was not, or nobody answered;
 * the reason is on stdout, which the kubelet puts into the pod's events. 2: bad usage.
 * With SECONDS it asks again until the answer is 2xx or the time is over.
 *
 * A small static program, because starting Python for each probe would cost more CPU than the driver itself.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { ANSWER_TIMEOUT_SECONDS = 2, RETRY_MILLISECONDS = 100 };

static char reason[512];

static int failed(const char *what)
{
	snprintf(reason, sizeof reason, "%s: %s", what, strerror(errno));
	return 0;
}

/* Whether the server said 2xx; if not, `reason` tells why. */
static int ask(const char *socket_path, const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct timeval timeout = {.tv_sec = ANSWER_TIMEOUT_SECONDS};
	char request[512], answer[1024];
	size_t length = 0;
	ssize_t count;
	int status = 0, ok = 0, fd;

	strcpy(address.sun_path, socket_path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return failed("socket");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
	if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
		failed(socket_path);
		goto out;
	}
	snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path);
	if (send(fd, request, strlen(request), MSG_NOSIGNAL) != (ssize_t)strlen(request)) {
		failed("sending the request");
		goto out;
	}
	while (length < sizeof answer - 1 && (count = recv(fd, answer + length, sizeof answer - 1 - length, 0)) > 0)
		length += (size_t)count;
	if (length == 0) {
		snprintf(reason, sizeof reason, "%s: no answer within %d s", path, ANSWER_TIMEOUT_SECONDS);
		goto out;
	}
	answer[length] = '\0';
	if (sscanf(answer, "HTTP/1.%*d %d", &status) == 1 && status >= 200 && status < 300) {
		ok = 1;
	} else {
		const char *body = strstr(answer, "\r\n\r\n");

		snprintf(reason, sizeof reason, "%s: status %d: %.400s", path, status, body ? body + 4 : "");
	}
out:
	close(fd);
	return ok;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	struct sockaddr_un address;
	double end;

	if (argc < 3 || argc > 4 || strlen(argv[1]) >= sizeof address.sun_path || strlen(argv[2]) > 200) {
		fprintf(stderr, "usage: probe SOCKET PATH [SECONDS]\n");
		return 2;
	}
	end = now() + (argc == 4 ? strtod(argv[3], NULL) : 0);
	while (!ask(argv[1], argv[2])) {
		if (now() >= end) {
			puts(reason);
			return 1;
		}
		poll(NULL, 0, RETRY_MILLISECONDS);
	}
	return 0;
}
