/* Preloaded into a campaign's process: counts the file operations under one folder, and at a chosen one kills the
   process, before it, half-way through it (writes) or after it. It can also log all of them, with what was written.
   Nothing is synced to the disk: a killed process leaves its files to the system, and power cuts are worked out. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { BEFORE, HALFWAY, AFTER };

static char folder[4096];
static long left = -1; /* operations until the kill; negative: none */
static int moment, log_file = -1;
static long count;

#define REAL(name) (__typeof__(&name)) dlsym(RTLD_NEXT, #name)

void shim_arm(const char *under, long at, int when, const char *log_path) {
    strncpy(folder, under, sizeof folder - 1);
    left = at;
    moment = when;
    count = 0;
    if (log_path && *log_path) {
        int (*real)(const char *, int, ...) = REAL(open);
        log_file = real(log_path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    }
}

long shim_count(void) { return count; }

void shim_note(long id);

static int is_ours(const char *path) {
    size_t n = strlen(folder);
    return n && strncmp(path, folder, n) == 0 && (path[n] == '/' || !path[n]);
}

static const char *path_of(int fd, char *buffer, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buffer, size - 1);
    buffer[n < 0 ? 0 : n] = 0;
    return buffer;
}

static void record(const char *op, const char *path, const char *other, off_t offset, const void *data, size_t size) {
    if (log_file < 0) return;
    ssize_t (*real)(int, const void *, size_t) = REAL(write);
    char head[8400];
    int n = snprintf(head, sizeof head, "%s\n%s\n%s\n%lld\n%zu\n", op, path, other, (long long)offset, data ? size : 0);
    real(log_file, head, n);
    if (data) real(log_file, data, size);
}

/* A fault was acknowledged. */
void shim_note(long id) { record("acknowledge", "", "", id, NULL, 0); }

/* Whether the process is to die at this operation; dies at once if before it. */
static int is_last(void) {
    count++;
    if (left < 0 || left-- > 0) return 0;
    if (moment == BEFORE) kill(getpid(), SIGKILL);
    return 1;
}

#define DIE_IF(last) do { if (last) kill(getpid(), SIGKILL); } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    ssize_t (*real)(int, const void *, size_t) = REAL(write);
    char path[4096];
    if (!*folder || fd == log_file || !is_ours(path_of(fd, path, sizeof path))) return real(fd, data, size);
    int last = is_last();
    off_t offset = lseek(fd, 0, SEEK_CUR);
    ssize_t done = real(fd, data, last && moment == HALFWAY ? size / 2 : size);
    DIE_IF(last);
    record("write", path, "", offset, data, done < 0 ? 0 : done);
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    ssize_t (*real)(int, const void *, size_t, off64_t) = REAL(pwrite64);
    char path[4096];
    if (!*folder || !is_ours(path_of(fd, path, sizeof path))) return real(fd, data, size, offset);
    int last = is_last();
    ssize_t done = real(fd, data, last && moment == HALFWAY ? size / 2 : size, offset);
    DIE_IF(last);
    record("write", path, "", offset, data, done < 0 ? 0 : done);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

#define ON_FILE(name, op)                                                             \
    int name(int fd) {                                                                \
        int (*real)(int) = REAL(name);                                                \
        char path[4096];                                                              \
        if (!*folder || !is_ours(path_of(fd, path, sizeof path))) return real(fd);    \
        DIE_IF(is_last());                                                            \
        record(op, path, "", 0, NULL, 0);                                             \
        return 0;                                                                     \
    }
ON_FILE(fsync, "sync")
ON_FILE(fdatasync, "sync")

int ftruncate64(int fd, off64_t size) {
    int (*real)(int, off64_t) = REAL(ftruncate64);
    char path[4096];
    if (!*folder || !is_ours(path_of(fd, path, sizeof path))) return real(fd, size);
    int last = is_last(), done = real(fd, size);
    DIE_IF(last);
    record("truncate", path, "", size, NULL, 0);
    return done;
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int rename(const char *from, const char *to) {
    int (*real)(const char *, const char *) = REAL(rename);
    if (!is_ours(to)) return real(from, to);
    int last = is_last(), done = real(from, to);
    DIE_IF(last);
    record("rename", from, to, 0, NULL, 0);
    return done;
}

int unlink(const char *path) {
    int (*real)(const char *) = REAL(unlink);
    if (!is_ours(path)) return real(path);
    int last = is_last(), done = real(path);
    DIE_IF(last);
    if (!done) record("unlink", path, "", 0, NULL, 0);
    return done;
}

int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = REAL(mkdir);
    if (!is_ours(path)) return real(path, mode);
    int last = is_last(), done = real(path, mode);
    DIE_IF(last);
    if (!done) record("mkdir", path, "", 0, NULL, 0);
    return done;
}

static int opened(int fd, const char *path, int flags, int existed) {
    if (fd >= 0 && is_ours(path) && (flags & O_CREAT) && !existed) record("create", path, "", 0, NULL, 0);
    if (fd >= 0 && is_ours(path) && (flags & O_TRUNC) && existed) record("truncate", path, "", 0, NULL, 0);
    return fd;
}

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...) {                                      \
        int (*real)(const char *, int, ...) = REAL(name);                             \
        mode_t mode = 0;                                                              \
        if (flags & O_CREAT) {                                                        \
            va_list rest;                                                             \
            va_start(rest, flags);                                                    \
            mode = va_arg(rest, mode_t);                                              \
            va_end(rest);                                                             \
        }                                                                             \
        if (!*folder || !is_ours(path) || !(flags & O_CREAT)) return real(path, flags, mode); \
        int existed = access(path, F_OK) == 0, last = is_last();                      \
        int fd = real(path, flags, mode);                                             \
        DIE_IF(last);                                                                 \
        return opened(fd, path, flags, existed);                                      \
    }
OPEN(open)
OPEN(open64)
