/* Loaded before libc: counts what a process does to the files under one folder, and at the n-th such operation kills the
   process, or lets this one and all later ones fail. So SQLite's own writes, tantivy's and Python's all count.

   A write that is killed or fails is torn: its first half is in the file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { COUNT = 1, KILL = 2, FULL = 3, FAILING = 4 };

static int mode; /* 0: not armed */
static long at;
static atomic_long num_done;
static char folder[4096];

void faults_arm(int new_mode, long new_at, const char *new_folder) {
    snprintf(folder, sizeof folder, "%s", new_folder);
    at = new_at;
    atomic_store(&num_done, 0);
    mode = new_mode;
}

long faults_count(void) { return atomic_load(&num_done); }

static int is_ours(const char *path) {
    return path != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_our_descriptor(int descriptor) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_ours(path);
}

/* Whether this operation is to fail; dies where it is to die. `tear` is told how to do half of it before. */
static int strikes(int grows) {
    long number = atomic_fetch_add(&num_done, 1) + 1;
    if (mode == COUNT || number < at) return 0;
    if (mode == FULL && !grows) return 0; /* a full disk lets files be renamed and removed */
    return 1;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int refuse(void) {
    if (mode == KILL) die();
    errno = mode == FULL ? ENOSPC : EIO;
    return -1;
}

#define REAL(result, name, ...) static result (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int descriptor, const void *bytes, size_t length) {
    REAL(ssize_t, write, int, const void *, size_t);
    if (mode && is_our_descriptor(descriptor) && strikes(1)) {
        if (length > 1) real(descriptor, bytes, length / 2);
        return refuse();
    }
    return real(descriptor, bytes, length);
}

#define POSITIONED(name, offset_type)                                                     \
    ssize_t name(int descriptor, const void *bytes, size_t length, offset_type offset) {  \
        REAL(ssize_t, name, int, const void *, size_t, offset_type);                      \
        if (mode && is_our_descriptor(descriptor) && strikes(1)) {                        \
            if (length > 1) real(descriptor, bytes, length / 2, offset);                  \
            return refuse();                                                              \
        }                                                                                 \
        return real(descriptor, bytes, length, offset);                                   \
    }
POSITIONED(pwrite, off_t)
POSITIONED(pwrite64, off64_t)

#define ON_DESCRIPTOR(name, grows)                                                        \
    int name(int descriptor) {                                                            \
        REAL(int, name, int);                                                             \
        if (mode && is_our_descriptor(descriptor) && strikes(grows)) return refuse();     \
        return real(descriptor);                                                          \
    }
ON_DESCRIPTOR(fsync, 1)
ON_DESCRIPTOR(fdatasync, 1)

#define TRUNCATING(name, offset_type)                                                     \
    int name(int descriptor, offset_type length) {                                        \
        REAL(int, name, int, offset_type);                                                \
        if (mode && is_our_descriptor(descriptor) && strikes(0)) return refuse();         \
        return real(descriptor, length);                                                  \
    }
TRUNCATING(ftruncate, off_t)
TRUNCATING(ftruncate64, off64_t)

#define ON_PATH(name, grows)                                                              \
    int name(const char *path) {                                                          \
        REAL(int, name, const char *);                                                    \
        if (mode && is_ours(path) && strikes(grows)) return refuse();                     \
        return real(path);                                                                \
    }
ON_PATH(unlink, 0)
ON_PATH(rmdir, 0)

int unlinkat(int parent, const char *path, int flags) { /* how shutil.rmtree removes */
    REAL(int, unlinkat, int, const char *, int);
    if (mode && (is_ours(path) || (path[0] != '/' && is_our_descriptor(parent))) && strikes(0)) return refuse();
    return real(parent, path, flags);
}

int mkdir(const char *path, mode_t rights) {
    REAL(int, mkdir, const char *, mode_t);
    if (mode && is_ours(path) && strikes(1)) return refuse();
    return real(path, rights);
}

int rename(const char *old, const char *path) {
    REAL(int, rename, const char *, const char *);
    if (mode && is_ours(path) && strikes(0)) return refuse();
    return real(old, path);
}

#define OPENING(name)                                                                     \
    int name(const char *path, int flags, ...) {                                          \
        REAL(int, name, const char *, int, ...);                                          \
        va_list rest;                                                                     \
        va_start(rest, flags);                                                            \
        mode_t rights = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;         \
        va_end(rest);                                                                     \
        if (mode && flags & O_CREAT && is_ours(path) && access(path, F_OK) != 0 && strikes(1)) return refuse(); \
        return real(path, flags, rights);                                                 \
    }
OPENING(open)
OPENING(open64)
