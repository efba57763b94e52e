// Threads that share the loops of a pass, on a machine shared with other programs.
//
// A loop's iterations are claimed one by one. A thread that finds none left waits until all are
// done. So a thread that lost its core delays only its own iterations: later it finds the missed
// loops ended, and joins the current one. A waiting thread spins for a moment and then sleeps,
// which frees its core for the threads it waits for.

#pragma once
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 64
#define MAX_JOB_BYTES 1024
#define SPINS 400  // reads of a variable before a thread sleeps: about 20 us
#define PATIENT_SPINS 20000  // the same if the next job is known to come soon: about 0.5 ms
#define LINE_BYTES 64
#define RANGES_PER_THREAD 16  // minimum ranges per thread, in a loop with enough iterations

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX()
#endif

// A count that belongs to one job: the low half is the count, the high half the job's `turn`. A
// count of an earlier job reads as 0. A count of a later job tells a late thread that its own job
// has ended.
typedef struct {
    uint64_t count;
} __attribute__((aligned(LINE_BYTES))) counter;

// A loop: the iterations done, and those claimed of each thread's share.
typedef struct {
    counter done, claimed[];
} loop;

// `turn` is even while there is a job; it is counted up when a job begins and when it ends. `wakes`
// counts the calls of `wake`.
typedef struct {
    int32_t turn __attribute__((aligned(LINE_BYTES)));
    int32_t wakes __attribute__((aligned(LINE_BYTES)));
    int32_t sleepers, inside;
    long threads, loop_bytes, num_loops;
    char *loops;
    void (*run)(void *job);
    pthread_t workers[MAX_THREADS];
    int leader_cpu;  // CPU on which thread 0 began its last job; -1 if workers may use it
    int bound;  // whether thread 0 is bound to that CPU, instead of `allowed`
    cpu_set_t allowed;
    char job[MAX_JOB_BYTES] __attribute__((aligned(LINE_BYTES)));
} team;

// A thread's part in a job; the first member of every job struct. `team` is null for a thread that
// works alone. `share` counts the shares that it has found claimed, `num_claimed` its iterations of
// the current loop. `progress` may be null; a watcher reads it to see that work goes on.
typedef struct {
    team *team;
    char *loop;
    long thread, threads, share, num_claimed;
    int64_t *progress;
    int32_t turn;
} member;

static team *the_team;
static int32_t spins_between_jobs = SPINS;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static long futex(int32_t *word, int what, int32_t value) {
    return syscall(SYS_futex, word, what | FUTEX_PRIVATE_FLAG, value, 0, 0, 0);
}

static void wake(team *of) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&of->sleepers, __ATOMIC_SEQ_CST)) return;
    __atomic_add_fetch(&of->wakes, 1, __ATOMIC_SEQ_CST);
    futex(&of->wakes, FUTEX_WAKE, MAX_THREADS);
}

// Linux may wake two threads on one CPU, above all in a virtual machine whose other CPUs have been
// idle, and part them only after tens of milliseconds. So workers keep off the CPU on which thread 0
// begins a job, and thread 0 is bound to it before it sleeps in a job.
static void keep_workers_off(team *of, int cpu) {
    cpu_set_t others;
    if (of->leader_cpu == cpu || cpu < 0 || cpu >= CPU_SETSIZE) return;
    of->leader_cpu = cpu;
    if (sched_getaffinity(0, sizeof others, &others) || CPU_COUNT(&others) < 2) return;
    CPU_CLR(cpu, &others);
    for (long i = 1; i < of->threads; i++)
        pthread_setaffinity_np(of->workers[i], sizeof others, &others);
}

static void bind_leader(team *of) {
    cpu_set_t own;
    if (of->bound || of->leader_cpu < 0) return;
    CPU_ZERO(&own);
    CPU_SET(of->leader_cpu, &own);
    of->bound = !sched_getaffinity(0, sizeof of->allowed, &of->allowed) &&
                !sched_setaffinity(0, sizeof own, &own);
}

static void release_leader(team *of) {
    if (of->bound) sched_setaffinity(0, sizeof of->allowed, &of->allowed);
    of->bound = 0;
}

// Waits until `until` holds. `wakes` is read before `until` is checked for the last time. So a call
// of `wake` after this check changes `wakes`, and the thread does not sleep.
#define AWAIT(of, thread, until) AWAIT_FOR(of, thread, SPINS, until)
#define AWAIT_FOR(of, thread, spins, until)                                    \
    for (long spin = 0; !(until); spin++) {                                    \
        if (spin < (spins)) {                                                  \
            RELAX();                                                           \
            continue;                                                          \
        }                                                                      \
        if (!(thread)) bind_leader(of);                                        \
        __atomic_add_fetch(&(of)->sleepers, 1, __ATOMIC_SEQ_CST);              \
        const int32_t seen = __atomic_load_n(&(of)->wakes, __ATOMIC_SEQ_CST);  \
        if (!(until)) futex(&(of)->wakes, FUTEX_WAIT, seen);                   \
        __atomic_sub_fetch(&(of)->sleepers, 1, __ATOMIC_SEQ_CST);              \
    }

// Returns the count in `seen`, 0 if it is of an earlier job, or -1 if it is of a later one.
static long count_of(uint64_t seen, int32_t turn) {
    const int32_t ahead = (int32_t)((uint32_t)(seen >> 32) - (uint32_t)turn);
    return ahead > 0 ? -1 : ahead < 0 ? 0 : (long)(uint32_t)seen;
}

// Adds `more` to a count below `limit` and returns the old count; else returns -1.
static long count_up(counter *at, int32_t turn, long more, long limit) {
    uint64_t seen = __atomic_load_n(&at->count, __ATOMIC_RELAXED);
    for (;;) {
        const long count = count_of(seen, turn);
        if (count < 0 || count >= limit) return -1;
        const uint64_t next = (uint64_t)(uint32_t)turn << 32 | (uint64_t)(count + more);
        if (__atomic_compare_exchange_n(&at->count, &seen, next, 1, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED))
            return count;
    }
}

static int ended(const loop *at, int32_t turn, long count) {
    const long done = count_of(__atomic_load_n(&at->done.count, __ATOMIC_ACQUIRE), turn);
    return done < 0 || done >= count;
}

// Only thread 0 counts progress: several threads would contend for its cache line.
static void advance(const member *me) {
    if (me->progress && !me->thread)
        __atomic_store_n(me->progress, *me->progress + 1, __ATOMIC_RELAXED);
}

// Claims and returns the next iteration of a loop of `count`; returns -1 once all threads' are
// done. Each thread begins with its own share, the same in every pass, whose data its caches may
// still have. All members must call this for every loop of a job, in the same order, until it
// returns -1.
static long claim(member *me, long count) {
    if (!me->team) {
        if (me->num_claimed < count) return advance(me), me->num_claimed++;
        me->num_claimed = 0;
        return -1;
    }
    loop *at = (loop *)me->loop;
    for (; me->share < me->threads; me->share++) {
        const long owner = (me->thread + me->share) % me->threads;
        const long begin = count * owner / me->threads, end = count * (owner + 1) / me->threads;
        const long index = count_up(&at->claimed[owner], me->turn, 1, end - begin);
        if (index < 0) continue;
        me->num_claimed++;
        advance(me);
        return begin + index;
    }
    const long mine = me->num_claimed;
    if (mine && count_up(&at->done, me->turn, mine, count) + mine == count) wake(me->team);
    AWAIT(me->team, me->thread, ended(at, me->turn, count))
    me->share = me->num_claimed = 0;
    me->loop += me->team->loop_bytes;
    return -1;
}

// Several short iterations that are claimed together: [from, to).
typedef struct {
    long from, to;
} range;

static int claim_range(member *me, long count, range *to) {
    const long share = count / (RANGES_PER_THREAD * me->threads), length = share > 1 ? share : 1;
    const long index = claim(me, (count + length - 1) / length);
    if (index < 0) return 0;
    to->from = index * length;
    to->to = to->from + length < count ? to->from + length : count;
    return 1;
}

#define EACH_CLAIMED(me, count, i)                          \
    for (range claimed; claim_range(me, count, &claimed);) \
        for (long i = claimed.from; i < claimed.to; i++)

static void *run_worker(void *number) {
    team *of = the_team;
    char job[MAX_JOB_BYTES] __attribute__((aligned(LINE_BYTES)));
    int32_t last = 0, turn;
    for (;;) {
        AWAIT_FOR(of, (long)number, __atomic_load_n(&spins_between_jobs, __ATOMIC_RELAXED),
                  (turn = __atomic_load_n(&of->turn, __ATOMIC_ACQUIRE)) != last && !(turn & 1))
        __atomic_add_fetch(&of->inside, 1, __ATOMIC_SEQ_CST);
        memcpy(job, of->job, sizeof job);
        void (*run)(void *) = of->run;
        member *me = (member *)job;
        if (__atomic_load_n(&of->turn, __ATOMIC_SEQ_CST) == turn) {  // else the job has ended
            last = turn;
            me->thread = (long)number;
            if (me->thread < me->threads) run(job);
        }
        __atomic_sub_fetch(&of->inside, 1, __ATOMIC_SEQ_CST);
        wake(of);
    }
    return 0;
}

// Sets whether the next job comes soon. If so, threads spin longer before they sleep.
static void expect_jobs(int soon) {
    __atomic_store_n(&spins_between_jobs, soon ? PATIENT_SPINS : SPINS, __ATOMIC_RELAXED);
}

// Waits until no thread is inside a job that has ended, so that the job's data may be freed.
static void wait_until_all_idle(void) {
    team *of = the_team;
    if (of) AWAIT(of, -1, !__atomic_load_n(&of->inside, __ATOMIC_SEQ_CST))
}

static void forget_team(void) {  // in a forked child, which has none of the threads
    the_team = 0;
    pthread_mutex_init(&one_at_a_time, 0);
}

static long loop_bytes_of(long threads) { return sizeof(loop) + threads * (long)sizeof(counter); }

// Returns a team with room for these numbers of threads and loops. Old loops are not freed: late
// threads may read them.
static team *team_for(long threads, long loops) {
    static int watched;
    if (!the_team) {
        if (!watched++) pthread_atfork(0, 0, forget_team);
        if (posix_memalign((void **)&the_team, LINE_BYTES, sizeof *the_team)) return the_team = 0;
        memset(the_team, 0, sizeof *the_team);
        the_team->threads = the_team->turn = 1;
        the_team->loop_bytes = loop_bytes_of(MAX_THREADS);
    }
    if (loops > the_team->num_loops) {
        char *memory;
        if (posix_memalign((void **)&memory, LINE_BYTES, 2 * loops * the_team->loop_bytes)) return 0;
        memset(memory, 0, 2 * loops * the_team->loop_bytes);
        the_team->loops = memory, the_team->num_loops = 2 * loops;
    }
    sigset_t all, before;  // block signals in our threads: the application handles them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; the_team->threads < threads; the_team->threads++) {
        pthread_t *thread = &the_team->workers[the_team->threads];
        if (pthread_create(thread, 0, run_worker, (void *)the_team->threads)) break;
        pthread_detach(*thread);
        the_team->leader_cpu = -1;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return the_team;
}

// Runs a job: calls `run` with a copy of `job` in up to `threads` threads, this one included. `job`
// begins with a member and has at most `loops` loops. While another job runs, only this thread
// calls `run`.
static void run_job(void (*run)(void *), void *job, long job_bytes, long threads, long loops) {
    member *me = job;
    *me = (member){.progress = me->progress, .threads = 1};
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    if (threads < 2 || job_bytes > MAX_JOB_BYTES || pthread_mutex_trylock(&one_at_a_time)) {
        run(job);
        return;
    }
    team *of = team_for(threads, loops);
    if (of) {
        const int32_t turn = (int32_t)((uint32_t)of->turn + 1);
        *me = (member){of, of->loops, 0, threads < of->threads ? threads : of->threads, 0, 0,
                       me->progress, turn};
        memcpy(of->job, job, job_bytes);
        of->run = run;
        keep_workers_off(of, sched_getcpu());
        __atomic_store_n(&of->turn, turn, __ATOMIC_SEQ_CST);
        wake(of);
    }
    run(job);
    if (of) {
        __atomic_add_fetch(&of->turn, 1, __ATOMIC_SEQ_CST);
        release_leader(of);
    }
    pthread_mutex_unlock(&one_at_a_time);
}
