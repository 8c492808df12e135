/* SPDX-License-Identifier: MIT
 *
 * emulator.cpp - a launch on one thread of the CPU. Every thread of the kernel is a fiber with a stack of its own,
 * which runs until it waits. Blocks of a cluster, and of a cooperative grid, live at the same time; others run one
 * after the other. What has no order on a GPU is drawn: which block, which warp and which lane goes first, and whether
 * a copy reads and writes when it is asked for or when it is waited for. */
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

#include "emulator.h"
#include "language.h"

namespace emulator {


constexpr int lanes = 32, max_warps = 32, named_barriers = 16;
constexpr size_t page = 4096, stack_bytes = 128 << 10;

index thread, block, threads, blocks;

/* ---- fibers ------------------------------------------------------------------------------------------------------ */

enum state { RUNNING, AT_BARRIER, AT_WARP, AT_WORD, AT_PHASE, AT_CLUSTER, DONE };
static const char *const words_of[] = {"runs",
                                       "waits at barrier",
                                       "waits for its warp, mask",
                                       "waits for the grid barrier, now",
                                       "waits for a phase of",
                                       "waits for the cluster, generation",
                                       "is done"};

struct copy {
    void *to;
    const void *from; /* nullptr: `value` */
    unsigned bytes, own;
    uint64_t *barrier; /* of bulk copies and what is sent */
    unsigned char value[16];
};

struct fiber {
    void *stack_pointer;
    char *stack;
    int number; /* of its thread in the block */
    state at;
    uint64_t detail; /* of what it waits for: */
    warp_meeting what;
    unsigned mask, from;
    uint64_t value;
    const void *word;
    uint32_t before, generation;
    std::vector<copy> copies; /* that it asked for and has not waited for, by groups */
    std::vector<unsigned> groups;
};

struct warp {
    unsigned live, ready, polling;
    unsigned at_barrier[named_barriers];
};

struct barrier {
    int arrived, expected;
    bool any, result;
};

/* A barrier in shared memory. */
struct phases {
    int32_t bytes;
    unsigned left : 11, arrivals : 11, parity : 1, mark : 9;
};
static_assert(sizeof(phases) == sizeof(uint64_t), "it is one word");
constexpr unsigned open_mark = 0x15a;

struct cluster {
    int arrived, live;
    uint32_t generation;
};

struct block_state {
    int number, live;
    cluster *of;
    int first, ranks; /* of its cluster: the first of all_blocks, and how many */
    warp warps[max_warps];
    barrier barriers[named_barriers];
    std::vector<fiber *> fibers;
    std::vector<char> variables; /* shared ones, while another block runs */
    char *dynamic;               /* dynamic shared memory, */
    size_t bytes;                /* between pages that may not be touched */
    std::vector<copy> copies;    /* to this block, on their way */
};

static const emulated_launch *launch;
static fiber *current;
static block_state *active;
static void *scheduler;
static char *variables; /* of the active block */
static size_t variable_bytes, dynamic_bytes;
static bool progress;
static std::vector<fiber *> idle_fibers;
static std::vector<std::unique_ptr<block_state>> all_blocks; /* that live at the same time, and those before */

static uint32_t draw()
{
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

/* Saves what a function's caller expects to find again, and goes on where `to` was saved. */
extern "C" void normfuse_emulator_switch(void **from, void *to);
__asm__(".text\n"
        ".globl normfuse_emulator_switch\n"
        ".hidden normfuse_emulator_switch\n"
        ".type normfuse_emulator_switch, @function\n"
        "normfuse_emulator_switch:\n"
        "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
        "    ret\n"
        ".size normfuse_emulator_switch, .-normfuse_emulator_switch\n");

[[noreturn]] static void leave();

static void begin_fiber()
{
    launch->specialized->call(launch->parameter);
    leave();
}

static fiber *make_fiber(int number)
{
    if (idle_fibers.empty()) {
        fiber *const made = new fiber();
        void *const stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, page, PROT_NONE) != 0)
            fail("no memory for another thread's stack");
        made->stack = static_cast<char *>(stack);
        idle_fibers.push_back(made);
    }
    fiber *const made = idle_fibers.back();
    idle_fibers.pop_back();
    made->number = number;
    made->at = RUNNING;
    made->generation = 0;
    /* Stacks that begin at the same place of their pages would share few lines of the caches. */
    void **top = reinterpret_cast<void **>(made->stack + stack_bytes - (size_t)(number % 61) * 64);
    *--top = nullptr; /* a function begins 8 bytes off a multiple of 16 */
    *--top = reinterpret_cast<void *>(begin_fiber);
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    made->stack_pointer = top;
    return made;
}

/* ---- what ends the process ----------------------------------------------------------------------------------------
 * */

static void print_place()
{
    fprintf(stderr, "FAIL: emulator: %s", launch ? launch->name : "no launch");
    if (active)
        fprintf(stderr, ", block %d of %u", active->number, launch->blocks);
    if (current)
        fprintf(stderr, ", thread %d of %u", current->number, launch->threads);
    fprintf(stderr, ": ");
}

void fail(const char *format, ...)
{
    va_list list;
    fflush(stdout);
    print_place();
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    _exit(1);
}

static void on_fault(int, siginfo_t *info, void *)
{
    fail("touches %p, which is no memory of its own", info->si_addr);
}

/* Faults are told of on a stack of their own: it may be a fiber's that is full. */
static void catch_faults()
{
    static char stack[64 << 10];
    const stack_t own = {stack, 0, sizeof stack};
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaltstack(&own, nullptr);
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

[[noreturn]] static void deadlock(const std::vector<block_state *> &live)
{
    int shown = 0;
    fflush(stdout);
    for (const block_state *b : live) {
        bool is_new[DONE] = {};
        for (const fiber *f : b->fibers)
            if (f->at != DONE && !is_new[f->at] && shown++ < 20) {
                is_new[f->at] = true;
                fprintf(stderr, "emulator: %s, block %d, thread %d %s %llx\n", launch->name, b->number, f->number,
                        words_of[f->at], (unsigned long long)f->detail);
            }
    }
    current = nullptr;
    active = nullptr;
    fail("all threads of %zu blocks wait", live.size());
}

/* ---- waiting ------------------------------------------------------------------------------------------------------
 * */

/* `polled`: the scheduler asks is_over; else another fiber makes it ready. */
static void wait_at(state at, uint64_t detail, bool polled)
{
    fiber *const own = current;
    own->at = at;
    own->detail = detail;
    if (polled)
        active->warps[own->number / lanes].polling |= 1u << own->number % lanes;
    normfuse_emulator_switch(&own->stack_pointer, scheduler);
    own->at = RUNNING;
}

/* The offset of a place in a block: shared variables have one address in all of them, dynamic memory one in each. */
static void *place_in(block_state &b, void *place)
{
    char *const at = static_cast<char *>(place);
    if (at >= variables && at < variables + variable_bytes)
        return &b == active ? at : b.variables.data() + (at - variables);
    if (at < b.dynamic || at >= b.dynamic + dynamic_bytes)
        fail("%p is not in shared memory", place);
    return at;
}

static void finish_phase(phases &own)
{
    if (own.left == 0 && own.bytes == 0) {
        own.parity ^= 1;
        own.left = own.arrivals;
    }
    progress = true;
}

static phases &phases_of(void *place)
{
    phases &own = *static_cast<phases *>(place);
    if (own.mark != open_mark)
        fail("the barrier at %p was not opened", place);
    return own;
}

static void deliver(block_state &to, const copy &own)
{
    memcpy(place_in(to, own.to), own.from ? own.from : own.value, own.bytes);
    phases &phase = phases_of(place_in(to, own.barrier));
    phase.bytes -= (int32_t)own.bytes;
    finish_phase(phase);
}

static void deliver_all(block_state &to, const uint64_t *barrier)
{
    for (size_t i = 0; i < to.copies.size();)
        if (!barrier || to.copies[i].barrier == barrier) {
            const copy own = to.copies[i];
            to.copies.erase(to.copies.begin() + (ptrdiff_t)i);
            deliver(to, own);
        } else {
            i++;
        }
}

static bool is_over(fiber &own)
{
    switch (own.at) {
    case AT_WORD: return ((*static_cast<const volatile uint32_t *>(own.word) ^ own.before) & 0x80000000u) != 0;
    case AT_PHASE:
        deliver_all(*active, static_cast<const uint64_t *>(own.word));
        return phases_of(const_cast<void *>(own.word)).parity != own.before;
    default: return active->of->generation >= own.generation;
    }
}

static void poll(state at, uint64_t detail)
{
    current->at = at;
    if (!is_over(*current))
        wait_at(at, detail, true);
    current->at = RUNNING;
}

uint4 *shared_memory()
{
    return reinterpret_cast<uint4 *>(active->dynamic);
}

/* ---- warps ------------------------------------------------------------------------------------------------------- */

/* True if all that `own` waits for wait for the same; they get their values. */
static bool finish_meeting(block_state &b, fiber &own)
{
    const int first = own.number / lanes * lanes;
    warp &of = b.warps[own.number / lanes];
    const unsigned wanted = own.mask & of.live;
    uint64_t any = 0, values[lanes];
    for (unsigned left = wanted; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        const fiber &other = *b.fibers[(size_t)(first + lane)];
        if (other.at != AT_WARP || other.mask != own.mask)
            return false;
        if (other.what != own.what)
            fail("thread %d and thread %d of a warp meet for different things", own.number, other.number);
        values[lane] = other.value;
        any |= other.value;
    }
    for (unsigned left = wanted; left; left &= left - 1) {
        fiber &other = *b.fibers[(size_t)(first + __builtin_ctz(left))];
        other.value = own.what == WARP_ANY ? any : wanted >> other.from & 1 ? values[other.from] : UINT64_MAX;
        other.at = RUNNING;
    }
    of.ready |= wanted;
    progress = true;
    return true;
}

uint64_t meet_warp(warp_meeting what, unsigned mask, uint64_t value, unsigned from)
{
    fiber &own = *current;
    if ((mask >> own.number % lanes & 1) == 0)
        fail("the mask %x leaves the thread out", mask);
    own.at = AT_WARP;
    own.what = what;
    own.mask = mask;
    own.value = value;
    own.from = from;
    if (finish_meeting(*active, own))
        active->warps[own.number / lanes].ready &= ~(1u << own.number % lanes);
    else
        wait_at(AT_WARP, mask, false);
    return own.value;
}

/* ---- barriers of a block ----------------------------------------------------------------------------------------- */

static void finish_barrier(block_state &b, int which)
{
    barrier &of = b.barriers[which];
    if (of.arrived == 0 || of.arrived < (of.expected ? of.expected : b.live))
        return;
    for (warp &each : b.warps) {
        each.ready |= each.at_barrier[which];
        each.at_barrier[which] = 0;
    }
    of.result = of.any;
    of.any = false;
    of.arrived = 0;
    progress = true;
}

void arrive_at_block(int which, int expected)
{
    barrier &of = active->barriers[which];
    if (of.arrived > 0 && of.expected != expected)
        fail("barrier %d is met by %d threads and by %d", which, of.expected, expected);
    of.expected = expected;
    of.arrived++;
    finish_barrier(*active, which);
}

bool meet_block(int which, int expected, bool value)
{
    const int own = current->number;
    warp &of = active->warps[own / lanes];
    active->barriers[which].any |= value;
    of.at_barrier[which] |= 1u << own % lanes;
    arrive_at_block(which, expected);
    if (of.at_barrier[which] >> own % lanes & 1)
        wait_at(AT_BARRIER, (uint64_t)which, false);
    else
        of.ready &= ~(1u << own % lanes);
    return active->barriers[which].result;
}

void barrier_open(uint64_t &barrier, int arrivals)
{
    const phases opened = {0, (unsigned)arrivals, (unsigned)arrivals, 0, open_mark};
    memcpy(&barrier, &opened, sizeof opened);
}

void barrier_arrive(uint64_t &barrier, unsigned bytes)
{
    phases &own = phases_of(&barrier);
    if (own.left == 0)
        fail("more threads arrive at a barrier than it was opened for");
    own.bytes += (int32_t)bytes;
    own.left--;
    finish_phase(own);
}

void barrier_await(uint64_t &barrier, unsigned parity)
{
    current->word = &barrier;
    current->before = parity;
    poll(AT_PHASE, (uint64_t)(uintptr_t)&barrier);
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

static void make_copy(const copy &own)
{
    memcpy(own.to, own.from, own.own);
    memset(static_cast<char *>(own.to) + own.own, 0, own.bytes - own.own);
}

void copy_later(void *to, const void *from, int own, int bytes)
{
    const copy asked = {to, from, (unsigned)bytes, (unsigned)own, nullptr, {}};
    if ((uintptr_t)to % (unsigned)bytes != 0 || (uintptr_t)from % (unsigned)bytes != 0)
        fail("a copy from %p to %p is not aligned to %d bytes", from, to, bytes);
    if (draw() & 1)
        make_copy(asked);
    else
        current->copies.push_back(asked);
}

/* Groups are how many of the copies are in them and before them. */
void commit()
{
    current->groups.push_back((unsigned)current->copies.size());
}

void wait_for_groups(int behind)
{
    fiber &own = *current;
    if (own.groups.size() <= (size_t)behind)
        return;
    const size_t over = own.groups.size() - (size_t)behind;
    const unsigned made = own.groups[over - 1];
    for (unsigned i = 0; i < made; i++)
        make_copy(own.copies[i]);
    own.copies.erase(own.copies.begin(), own.copies.begin() + made);
    own.groups.erase(own.groups.begin(), own.groups.begin() + (ptrdiff_t)over);
    for (unsigned &group : own.groups)
        group -= made;
}

static void send_off(block_state &to, const copy &own)
{
    if (to.live == 0)
        fail("block %d, which is sent something, has left", to.number);
    if (draw() & 1)
        deliver(to, own);
    else
        to.copies.push_back(own);
}

void bulk_copy(void *to, const void *from, unsigned bytes, uint64_t &barrier)
{
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16 != 0)
        fail("a bulk copy of %u bytes from %p to %p is not aligned to 16 bytes", bytes, from, to);
    send_off(*active, {to, from, bytes, bytes, &barrier, {}});
}

/* ---- clusters and grids ------------------------------------------------------------------------------------------ */

static void finish_cluster(cluster &of)
{
    if (of.arrived > 0 && of.arrived == of.live) {
        of.generation++;
        of.arrived = 0;
        progress = true;
    }
}

void cluster_arrive()
{
    cluster &of = *active->of;
    current->generation = of.generation + 1;
    of.arrived++;
    finish_cluster(of);
}

void cluster_await()
{
    poll(AT_CLUSTER, current->generation);
}

void cluster_send(uint64_t &barrier, void *place, int rank, const void *value, unsigned bytes)
{
    if (rank < 0 || rank >= active->ranks)
        fail("block %d of a cluster of %d is sent something", rank, active->ranks);
    if (active->of->generation == 0)
        fail("something is sent before all blocks of the cluster have opened their mailboxes");
    block_state &to = *all_blocks[(size_t)(active->first + rank)];
    const auto place_of = [&](void *own) {
        char *const at = static_cast<char *>(own);
        return at >= active->dynamic && at < active->dynamic + dynamic_bytes ? to.dynamic + (at - active->dynamic) : at;
    };
    copy own = {place_of(place), nullptr, bytes, bytes, reinterpret_cast<uint64_t *>(place_of(&barrier)), {}};
    memcpy(own.value, value, bytes);
    send_off(to, own);
}

void await_flip(const uint32_t *word, uint32_t before)
{
    current->word = word;
    current->before = before;
    poll(AT_WORD, *word);
}

int64_t cycles()
{
    static int64_t now;
    return now += 10000;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static void leave()
{
    fiber &own = *current;
    block_state &b = *active;
    warp &of = b.warps[own.number / lanes];
    of.live &= ~(1u << own.number % lanes);
    b.live--;
    b.of->live--;
    own.at = DONE;
    own.copies.clear();
    own.groups.clear();
    progress = true;
    for (int which = 0; which < named_barriers; which++)
        if (b.barriers[which].expected == 0)
            finish_barrier(b, which);
    for (unsigned left = of.live; left; left &= left - 1) {
        fiber &other = *b.fibers[(size_t)(own.number / lanes * lanes + __builtin_ctz(left))];
        if (other.at == AT_WARP)
            (void)finish_meeting(b, other);
    }
    finish_cluster(*b.of);
    if (b.live == 0 && !b.copies.empty())
        fail("the block leaves before %zu copies to its shared memory are there", b.copies.size());
    normfuse_emulator_switch(&own.stack_pointer, scheduler);
    abort();
}

static void activate(block_state &b)
{
    if (active == &b)
        return;
    if (active)
        memcpy(active->variables.data(), variables, variable_bytes);
    memcpy(variables, b.variables.data(), variable_bytes);
    active = &b;
    block.x = (unsigned)b.number;
}

static void run_fiber(fiber &own)
{
    current = &own;
    thread.x = (unsigned)own.number;
    normfuse_emulator_switch(&scheduler, own.stack_pointer);
    current = nullptr;
}

static bool poll_fibers(block_state &b)
{
    bool any = false;
    for (size_t w = 0; w * lanes < b.fibers.size(); w++)
        for (unsigned left = b.warps[w].polling; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            current = b.fibers[w * lanes + (size_t)lane];
            if (is_over(*current)) {
                b.warps[w].polling &= ~(1u << lane);
                b.warps[w].ready |= 1u << lane;
                any = true;
            }
            current = nullptr;
        }
    return any;
}

/* Until all of its threads wait. */
static void run_block(block_state &b)
{
    activate(b);
    const size_t warps = (b.fibers.size() + lanes - 1) / lanes;
    do {
        const size_t first = draw() % warps;
        const bool downwards = draw() & 1;
        for (bool any = true; any;) {
            any = false;
            for (size_t i = 0; i < warps; i++) {
                const size_t w = (first + i) % warps;
                warp &of = b.warps[w];
                while (of.ready) {
                    const int lane = downwards ? 31 - __builtin_clz(of.ready) : __builtin_ctz(of.ready);
                    of.ready &= ~(1u << lane);
                    run_fiber(*b.fibers[w * lanes + (size_t)lane]);
                    any = progress = true;
                }
            }
        }
    } while (poll_fibers(b));
}

static void begin_block(block_state &b, int number, cluster &of, int first, int ranks)
{
    const int count = (int)launch->threads;
    b.number = number;
    b.live = count;
    b.of = &of;
    b.first = first;
    b.ranks = ranks;
    memset(b.warps, 0, sizeof b.warps);
    memset(b.barriers, 0, sizeof b.barriers);
    b.variables.assign(variable_bytes, (char)0xff);
    if (!b.dynamic || b.bytes != dynamic_bytes) {
        emulator_free(b.dynamic);
        b.dynamic = static_cast<char *>(emulator_allocate(dynamic_bytes));
        b.bytes = dynamic_bytes;
    }
    memset(b.dynamic, 0xff, dynamic_bytes);
    for (int i = 0; i < count; i++) {
        b.fibers.push_back(make_fiber(i));
        b.warps[i / lanes].live |= 1u << i % lanes;
        b.warps[i / lanes].ready |= 1u << i % lanes;
    }
}

/* Blocks [begin, end), all at once. */
static void run_blocks(int begin, int end, int ranks)
{
    static std::vector<cluster> clusters;
    const int count = end - begin;
    std::vector<block_state *> live;
    clusters.resize((size_t)(count / ranks));
    for (int i = 0; i < count; i++) {
        if ((size_t)i == all_blocks.size())
            all_blocks.push_back(std::make_unique<block_state>());
        cluster &of = clusters[(size_t)(i / ranks)];
        if (i % ranks == 0)
            of = {0, ranks * (int)launch->threads, 0};
        begin_block(*all_blocks[(size_t)i], begin + i, of, i - i % ranks, ranks);
        live.push_back(all_blocks[(size_t)i].get());
    }
    if (draw() & 1)
        std::reverse(live.begin(), live.end());
    while (!live.empty()) {
        progress = false;
        for (block_state *b : live)
            run_block(*b);
        if (!progress)
            deadlock(live);
        live.erase(std::remove_if(live.begin(), live.end(), [](const block_state *b) { return b->live == 0; }),
                   live.end());
    }
    active = nullptr;
    for (int i = 0; i < count; i++) {
        std::vector<fiber *> &own = all_blocks[(size_t)i]->fibers;
        idle_fibers.insert(idle_fibers.end(), own.rbegin(), own.rend());
        own.clear();
    }
}

/* This thread's shared variables: the thread-local ones of this library, which has no others that a kernel reads. */
static int find_variables(struct dl_phdr_info *info, size_t, void *inside)
{
    bool is_own = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &part = info->dlpi_phdr[i];
        const char *const begin = reinterpret_cast<const char *>(info->dlpi_addr + part.p_vaddr);
        is_own |= part.p_type == PT_LOAD && inside >= begin && inside < begin + part.p_memsz;
        if (part.p_type == PT_TLS)
            variable_bytes = part.p_memsz;
    }
    variables = static_cast<char *>(info->dlpi_tls_data);
    return is_own;
}

} // namespace emulator

using namespace emulator;

void emulator_run(const struct emulated_launch *own)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static const char inside = 0;
    pthread_mutex_lock(&mutex);
    if (own->specialized) {
        variables = own->specialized->variables;
        variable_bytes = (size_t)(own->specialized->variables_end - variables);
    } else {
        dl_iterate_phdr(find_variables, const_cast<char *>(&inside));
    }
    catch_faults();
    launch = own;
    dynamic_bytes = own->shared;
    threads.x = own->threads;
    blocks.x = own->blocks;
    const std::vector<char> saved(variables, variables + variable_bytes);
    const int ranks = (int)own->cluster, count = (int)own->blocks;
    const int at_once = own->cooperative ? count : ranks;
    const bool downwards = draw() & 1;
    for (int i = 0; i < count; i += at_once) {
        const int begin = downwards ? count - at_once - i : i;
        run_blocks(begin, begin + at_once, ranks);
    }
    memcpy(variables, saved.data(), variable_bytes);
    launch = nullptr;
    pthread_mutex_unlock(&mutex);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Its end is the end of a page, up to 16 bytes. */
struct guarded {
    char *pages;
    size_t bytes;
};
static std::unordered_map<void *, guarded> allocations;

void *emulator_allocate(size_t bytes)
{
    const size_t own = (bytes + 15) / 16 * 16, whole = (own + page - 1) / page * page;
    char *const pages = static_cast<char *>(
        mmap(nullptr, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (pages == MAP_FAILED || mprotect(pages + page, whole, PROT_READ | PROT_WRITE) != 0)
        return nullptr;
    memset(pages + page, 0xff, whole);
    char *const memory = pages + page + whole - own;
    allocations[memory] = {pages, whole + 2 * page};
    return memory;
}

void emulator_free(void *memory)
{
    const auto found = allocations.find(memory);
    if (found == allocations.end())
        return;
    munmap(found->second.pages, found->second.bytes);
    allocations.erase(found);
}
