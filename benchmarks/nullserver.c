/* The null server in C: same wire form and stamps as nullserver.py, for benches in which Python would be the slower side.
 *
 * One thread, epoll. It answers completions with made-up token ids, whole at once or at a steady rate, and stamps arrivals
 * and sends in CLOCK_MONOTONIC ns. It knows no faults and no framings: those are nullserver.py's. Built and used by bench.py.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_FDS 16384
#define BUFFER_BYTES (1 << 20)
#define MAX_EVENTS 256

typedef struct {
    char id[64];
    int64_t kernel_ns, received_ns;
    int64_t *chunk_ns;
    int num_chunks;
} Stamp;

typedef struct {
    char *in;
    size_t used;
    int64_t kernel_ns, received_ns;
    int stamp, sent_tokens, max_tokens, prompt_tokens, is_streaming;
    int64_t next_ns;
} Peer;

static Peer peers[MAX_FDS];
static int active[MAX_FDS], num_active;
static Stamp *stamps;
static int num_stamps, room_stamps;
static int64_t token_interval_ns, realtime_offset_ns;
static int keeps_stamps = 1;
static char out[4 << 20];

static int64_t read_clock(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
static int64_t now_ns(void) { return read_clock(CLOCK_MONOTONIC); }

static int64_t config_number(const char *config, const char *key, int64_t otherwise) {
    const char *at = strstr(config, key);
    if (!at) return otherwise;
    at = strchr(at, ':');
    if (!at) return otherwise;
    at += strspn(at, ": ");
    return *at == 't' ? 1 : atoll(at);
}

static void close_peer(int fd) {
    peers[fd].used = 0;
    peers[fd].is_streaming = 0;
    close(fd);
}

/* A full socket buffer would mean a client that does not read; the null server waits for it a little and then gives up. */
static void send_all(int fd, const char *data, size_t length) {
    int patience = 1000;
    while (length && patience) {
        ssize_t taken = send(fd, data, length, MSG_NOSIGNAL);
        if (taken < 0) {
            if (errno != EAGAIN) return;
            usleep(100);
            patience--;
            continue;
        }
        data += taken;
        length -= taken;
    }
}

static int new_stamp(const char *id, const Peer *peer, int max_tokens) {
    if (!keeps_stamps) return -1;
    if (num_stamps == room_stamps) {
        room_stamps = room_stamps ? 2 * room_stamps : 4096;
        stamps = realloc(stamps, room_stamps * sizeof *stamps);
    }
    Stamp *stamp = &stamps[num_stamps];
    snprintf(stamp->id, sizeof stamp->id, "%s", id);
    stamp->kernel_ns = peer->kernel_ns;
    stamp->received_ns = peer->received_ns;
    stamp->num_chunks = 0;
    stamp->chunk_ns = malloc(sizeof(int64_t) * (token_interval_ns ? max_tokens : 1));
    return num_stamps++;
}

static void mark_send(int place) {
    if (place >= 0) stamps[place].chunk_ns[stamps[place].num_chunks++] = now_ns();
}

static void send_stamps(int fd) {
    size_t room = 1024, used = 0;
    for (int i = 0; i < num_stamps; i++) room += 256 + 24 * (size_t)stamps[i].num_chunks;
    char *text = malloc(room);
    used += sprintf(text + used, "{\"requests\":[");
    for (int i = 0; i < num_stamps; i++) {
        used += sprintf(text + used, "%s{\"request_id\":\"%s\",\"kernel_ns\":%lld,\"received_ns\":%lld,\"chunk_ns\":[",
                        i ? "," : "", stamps[i].id, (long long)stamps[i].kernel_ns, (long long)stamps[i].received_ns);
        for (int k = 0; k < stamps[i].num_chunks; k++)
            used += sprintf(text + used, "%s%lld", k ? "," : "", (long long)stamps[i].chunk_ns[k]);
        used += sprintf(text + used, "]}");
    }
    used += sprintf(text + used, "]}");
    char head[128];
    int length = sprintf(head, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", used);
    send_all(fd, head, length);
    send_all(fd, text, used);
    free(text);
}

static int put_event(char *to, const char *id, int token) {
    char event[512];
    int length = sprintf(event,
                         "data: {\"id\":\"cmpl-%s\",\"object\":\"text_completion\",\"created\":0,\"model\":\"null\",\"choices\":["
                         "{\"index\":0,\"text\":\" x\",\"finish_reason\":null,\"token_ids\":[%d]}]}\n\n",
                         id, 1000 + token % 9000);
    return sprintf(to, "%x\r\n%s\r\n", length, event);
}

static int put_stream_end(char *to, const char *id, int prompt_tokens, int tokens) {
    char event[512];
    int length = sprintf(event,
                         "data: {\"id\":\"cmpl-%s\",\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,"
                         "\"total_tokens\":%d}}\n\n",
                         id, prompt_tokens, tokens, prompt_tokens + tokens);
    return sprintf(to, "%x\r\n%s\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", length, event);
}

static void answer_whole(int fd, const char *id, int prompt_tokens, int tokens, int place) {
    static char body[1 << 20];
    int used = sprintf(body,
                       "{\"id\":\"cmpl-%s\",\"object\":\"text_completion\",\"created\":0,\"model\":\"null\",\"choices\":[{\"index\":0,"
                       "\"text\":\" x\",\"finish_reason\":\"length\",\"token_ids\":[",
                       id);
    for (int i = 0; i < tokens; i++) used += sprintf(body + used, "%s%d", i ? "," : "", 1000 + i % 9000);
    used += sprintf(body + used, "]}],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d}}",
                    prompt_tokens, tokens, prompt_tokens + tokens);
    int head = sprintf(out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", used);
    memcpy(out + head, body, used);
    mark_send(place);
    send_all(fd, out, head + used);
}

static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

static void send_tokens(int fd, Peer *peer, const char *id) {
    int64_t now = now_ns();
    while (peer->is_streaming && peer->next_ns <= now) {
        int used = 0;
        if (peer->sent_tokens == 0) used += sprintf(out, "%s", STREAM_HEAD);
        int count = token_interval_ns ? 1 : peer->max_tokens;
        for (int i = 0; i < count; i++) used += put_event(out + used, id, peer->sent_tokens++);
        int is_last = peer->sent_tokens >= peer->max_tokens;
        mark_send(peer->stamp);
        send_all(fd, out, used);
        if (is_last) {
            used = put_stream_end(out, id, peer->prompt_tokens, peer->max_tokens);
            send_all(fd, out, used);
            peer->is_streaming = 0;
        }
        peer->next_ns += token_interval_ns;
    }
}

static void answer(int fd, Peer *peer, char *body, size_t length) {
    char last = body[length];
    body[length] = 0;
    char id[64] = "none";
    char *at = strstr(body, "\"request_id\":\"");
    if (at) sscanf(at + 14, "%63[^\"]", id);
    char *prompt = strstr(body, "\"prompt\":["), *end = prompt ? strchr(prompt, ']') : NULL;
    int prompt_tokens = 1;
    for (char *c = prompt; c && c < end; c++) prompt_tokens += *c == ',';
    const char *rest = end ? end : body;
    at = strstr(rest, "\"max_tokens\":");
    int tokens = at ? atoi(at + 13) : 16;
    int streams = strstr(rest, "\"stream\":true") != NULL;
    body[length] = last;
    int place = new_stamp(id, peer, tokens);
    if (!streams) {
        answer_whole(fd, id, prompt_tokens, tokens, place);
        return;
    }
    peer->stamp = place;
    peer->prompt_tokens = prompt_tokens;
    peer->max_tokens = tokens;
    peer->sent_tokens = 0;
    peer->is_streaming = 1;
    peer->next_ns = now_ns() + token_interval_ns;
    if (token_interval_ns) active[num_active++] = fd;
    else send_tokens(fd, peer, id);
}

static void receive(int fd) {
    Peer *peer = &peers[fd];
    if (!peer->in) peer->in = malloc(BUFFER_BYTES + 1);
    char control[64];
    struct iovec part = {peer->in + peer->used, BUFFER_BYTES - peer->used};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(fd, &message, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        close_peer(fd);
        return;
    }
    if (!peer->used) {
        peer->received_ns = now_ns();
        peer->kernel_ns = 0;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
            if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_TIMESTAMPNS) {
                struct timespec stamp;
                memcpy(&stamp, CMSG_DATA(c), sizeof stamp);
                peer->kernel_ns = (int64_t)stamp.tv_sec * 1000000000 + stamp.tv_nsec - realtime_offset_ns;
            }
    }
    peer->used += got;
    peer->in[peer->used] = 0;
    char *head_end = memmem(peer->in, peer->used, "\r\n\r\n", 4);
    if (!head_end) return;
    if (!strncmp(peer->in, "GET", 3)) {
        if (strncmp(peer->in, "GET /stamps", 11) == 0) send_stamps(fd);
        else send_all(fd, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 38);
        peer->used = 0;
        return;
    }
    char *length_at = strcasestr(peer->in, "\r\ncontent-length:");
    size_t length = length_at ? strtoul(length_at + 17, NULL, 10) : 0, head = head_end + 4 - peer->in;
    if (peer->used < head + length) return;
    peer->used = 0;
    answer(fd, peer, peer->in + head, length);
}

static void accept_all(int listener, int poller) {
    int fd, yes = 1, size = 1 << 20;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (fd >= MAX_FDS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static void run_timed(int timer) {
    int64_t earliest = 0;
    for (int i = 0; i < num_active;) {
        int fd = active[i];
        Peer *peer = &peers[fd];
        if (peer->is_streaming) send_tokens(fd, peer, peer->stamp >= 0 ? stamps[peer->stamp].id : "none");
        if (!peer->is_streaming) {
            active[i] = active[--num_active];
            continue;
        }
        if (!earliest || peer->next_ns < earliest) earliest = peer->next_ns;
        i++;
    }
    struct itimerspec when = {.it_value = {earliest / 1000000000, earliest % 1000000000}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
}

int main(int argc, char **argv) {
    const char *config = argc > 1 ? argv[1] : "{}";
    token_interval_ns = config_number(config, "\"token_interval_ns\"", 0);
    keeps_stamps = (int)config_number(config, "\"keeps_stamps\"", 1);
    realtime_offset_ns = read_clock(CLOCK_REALTIME) - now_ns();
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), yes = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                  .sin_port = htons((uint16_t)config_number(config, "\"port\"", 0))};
    socklen_t size = sizeof address;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    setsockopt(listener, SOL_SOCKET, SO_TIMESTAMPNS, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 4096)) return 1;
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("{\"port\":%d}\n", ntohs(address.sin_port));
    fflush(stdout);
    int poller = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[MAX_EVENTS];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    event.data.fd = timer;
    epoll_ctl(poller, EPOLL_CTL_ADD, timer, &event);
    for (;;) {
        int count = epoll_wait(poller, events, MAX_EVENTS, -1);
        for (int i = 0; i < count; i++) {
            if (events[i].data.fd == listener) accept_all(listener, poller);
            else if (events[i].data.fd != timer) receive(events[i].data.fd);
        }
        if (token_interval_ns) run_timed(timer);
    }
}
