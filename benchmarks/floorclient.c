/* A replay client in C, for one figure only: how late a re-arrival is at the server when no Python is in the way.
 *
 * Reads "port sessions requests prompt_tokens generate_tokens" and then one wait in ns per (session, request) from
 standard input; replays like the epoll client: epoll, one kept connection per session, timerfd, a final spin of 300 us,
 never early. Records nothing: the server's stamps tell. Built and used by benchmarks/client.py.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 300000
#define SLICE_NS 100000

typedef struct {
    int fd, request;
    int64_t due_ns;
    char *payload;
    int length;
    char tail[8];
} Session;

static Session *sessions;
static int num_sessions, num_requests, prompt_tokens, generate_tokens;
static int64_t *waits;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The same short scheduler slice that the epoll client asks for. */
static void ask_short_slice(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attr = {.size = 48, .runtime = SLICE_NS};
    syscall(SYS_sched_setattr, 0, &attr, 0);
}

static void prepare(int place) {
    Session *session = &sessions[place];
    char *body = malloc(8 * (size_t)(prompt_tokens + 8 * session->request) + 512);
    int used = sprintf(body, "{\"model\":\"null\",\"prompt\":[");
    for (int i = 0; i < prompt_tokens + 8 * session->request; i++) used += sprintf(body + used, "%s%d", i ? "," : "",
    1000 + i); used += sprintf(body + used, "],\"max_tokens\":%d,\"request_id\":\"c-%d-%d\",\"stream\":true}",
    generate_tokens, place,
                    session->request);
    free(session->payload);
    session->payload = malloc(used + 256);
    session->length = sprintf(session->payload,
                              "POST /v1/completions HTTP/1.1\r\nHost: null\r\nContent-Type: application/json\r\n"
                              "Content-Length: %d\r\n\r\n", used);
    memcpy(session->payload + session->length, body, used);
    session->length += used;
    free(body);
}

static int receive(Session *session) {
    static char data[65536];
    ssize_t got = recv(session->fd, data, sizeof data, 0);
    if (got <= 0) return 0;
    /* The last five bytes received so far, across receives: the end of a chunked body. */
    int keep = got >= 5 ? 0 : 5 - (int)got;
    memmove(session->tail, session->tail + 5 - keep, keep);
    memcpy(session->tail + keep, data + got - (5 - keep), 5 - keep);
    return memcmp(session->tail, "0\r\n\r\n", 5) == 0;
}

int main(void) {
    int port, yes = 1, size = 1 << 20, left;
    if (scanf("%d %d %d %d %d", &port, &num_sessions, &num_requests, &prompt_tokens, &generate_tokens) != 5) return 2;
    left = num_sessions * num_requests;
    waits = malloc(sizeof(int64_t) * left);
    for (int i = 0; i < left; i++)
        if (scanf("%ld", &waits[i]) != 1) return 2;
    sessions = calloc(num_sessions, sizeof *sessions);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port =
    htons(port)}; int poller = epoll_create1(0), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)num_sessions}, events[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, timer, &event);
    ask_short_slice();
    for (int i = 0; i < num_sessions; i++) {
        Session *session = &sessions[i];
        session->fd = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(session->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        setsockopt(session->fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        if (connect(session->fd, (struct sockaddr *)&address, sizeof address)) return 1;
        event.data.u32 = (uint32_t)i;
        epoll_ctl(poller, EPOLL_CTL_ADD, session->fd, &event);
        prepare(i);
    }
    int64_t start_ns = now_ns() + 5000000;
    for (int i = 0; i < num_sessions; i++) sessions[i].due_ns = start_ns;
    while (left) {
        int64_t next_ns = 0, now = now_ns();
        for (int i = 0; i < num_sessions; i++) {
            Session *session = &sessions[i];
            if (session->due_ns && session->due_ns <= now) {
                session->due_ns = 0;
                if (send(session->fd, session->payload, session->length, MSG_NOSIGNAL) != session->length) return 1;
                now = now_ns();
            }
            if (session->due_ns && (!next_ns || session->due_ns < next_ns)) next_ns = session->due_ns;
        }
        int timeout = -1;
        if (next_ns && next_ns - now <= SPIN_NS) {
            timeout = 0;
        } else {
            int64_t wake_ns = next_ns ? next_ns - SPIN_NS : 0;
            struct itimerspec when = {.it_value = {wake_ns / 1000000000, wake_ns % 1000000000}};
            timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
        }
        int count = epoll_wait(poller, events, 256, timeout);
        for (int i = 0; i < count; i++) {
            int place = (int)events[i].data.u32;
            if (place == num_sessions || !receive(&sessions[place])) continue;
            int64_t done_ns = now_ns();
            Session *session = &sessions[place];
            memset(session->tail, 0, sizeof session->tail);
            left--;
            int64_t wait_ns = waits[place * num_requests + session->request];
            if (++session->request < num_requests) {
                session->due_ns = done_ns + wait_ns;
                prepare(place);
            }
        }
    }
    return 0;
}
