//! Persistent workers for fork-join over slices.
//!
//! The caller of [`Pool::run`] is worker 0; the others wait for the next job, spinning for a bounded while and then parked. While
//! they spin a fork-join costs about a microsecond, which is what makes the hundreds of joins in one decode step affordable.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Spins of an idle worker before it gives its core to others: some tens of microseconds, the length of the serial stretches between
/// two joins of a decode step.
const IDLE_SPINS_MAX: u32 = 4_000;
/// Yields after the spins before a worker parks. A worker that parks costs the next fork a wake-up of tens of microseconds.
const IDLE_YIELDS_MAX: u32 = 50;
/// Spins of a caller that waits for the last tasks before it yields: about a millisecond, longer than a task.
const JOIN_SPINS_MAX: u32 = 50_000;
/// Runs of tasks that [`Pool::for_each`] deals out; more workers share them.
const RUNS_MAX: usize = 16;

thread_local! {
    /// Set while this thread runs a job of any pool; a nested call then runs on this thread alone.
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// A job; the lifetime is erased, the call that made it does not return before all workers are done with it.
type Job = *const (dyn Fn(usize) + Sync);

/// A value on cache lines of its own: the gate is polled by all workers while others write the neighbours.
#[repr(align(128))]
struct Padded<T>(T);

/// State of the gate, in one word so that entering a job is one atomic step: the number of the job in the upper half, whether workers
/// may still enter it, and how many are inside.
#[derive(Clone, Copy)]
struct Gate(u64);

impl Gate {
    const OPEN: u64 = 1 << 31;

    fn job(self) -> u64 {
        self.0 >> 32
    }

    fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    fn inside(self) -> u64 {
        self.0 & (Self::OPEN - 1)
    }

    /// The next job, open, with nobody inside.
    fn next(self) -> Gate {
        Gate((self.job() + 1) << 32 | Self::OPEN)
    }
}

struct Shared {
    gate: Padded<AtomicU64>,
    /// Workers that have not finished the current job; only for jobs that each worker takes part in.
    remaining: Padded<AtomicUsize>,
    job: UnsafeCell<Option<Job>>,
    /// One per worker thread: it is parked, or about to be.
    parked: Box<[Padded<AtomicBool>]>,
    shutdown: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Whether a spinning thread keeps no other thread of this pool from its core.
    may_spin: bool,
}

// SAFETY: `job` is written only by the holder of `Pool::caller` while the gate is closed and nobody is inside, and read by workers
// only after they entered through the gate that was opened after the write; everything else is atomic or locked.
unsafe impl Sync for Shared {}
// SAFETY: the job pointer is the only field that is not `Send`; it points to a `Sync` closure that outlives the job.
unsafe impl Send for Shared {}

/// A fixed set of worker threads.
///
/// Thread-safe: jobs of several callers run one after the other. A call from inside a job, of this or another pool, runs all its
/// workers' shares in turn on the calling thread.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    handles: Vec<Thread>,
    caller: Mutex<()>,
}

impl Pool {
    /// Starts `threads - 1` worker threads; 0 counts as 1. Threads that the system refuses to start are done without, so
    /// [`Pool::threads`] may be less than asked for.
    pub fn new(threads: usize) -> Pool {
        let threads = threads.max(1);
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            gate: Padded(AtomicU64::new(0)),
            remaining: Padded(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            parked: (1..threads).map(|_| Padded(AtomicBool::new(false))).collect(),
            shutdown: AtomicBool::new(false),
            panic: Mutex::new(None),
            may_spin: threads <= cores,
        });
        let mut workers = Vec::with_capacity(threads - 1);
        for worker in 1..threads {
            let shared = Arc::clone(&shared);
            let spawned = thread::Builder::new().name(format!("forebay-{worker}")).spawn(move || work(&shared, worker));
            match spawned {
                Ok(handle) => workers.push(handle),
                Err(_) => break,
            }
        }
        let handles = workers.iter().map(|worker| worker.thread().clone()).collect();
        Pool { shared, workers, handles, caller: Mutex::new(()) }
    }

    /// Workers, the caller counted.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The physical cores that this process may use; what `--threads` defaults to.
    pub fn default_threads() -> usize {
        let usable = thread::available_parallelism().map_or(1, usize::from);
        physical_cores().map_or(usable, |cores| cores.clamp(1, usable))
    }

    /// Calls `f(worker)` once for each worker in `0..threads()` and returns when all are done.
    ///
    /// A panic of any worker is raised again here, after the join. Nothing is allocated.
    pub fn run(&self, f: impl Fn(usize) + Sync) {
        if self.is_alone() {
            (0..self.threads()).for_each(f);
        } else {
            self.fork_join(&f, true);
        }
    }

    /// Calls `f(worker, task)` once for each task in `0..tasks`. Each worker has a run of neighbouring tasks and claims them in order, then
    /// those that others have left, so which worker gets which task varies from call to call; a result must not depend on it. A
    /// worker that the system keeps from running is done without.
    ///
    /// Neighbouring tasks read neighbouring memory, and what a core's prefetchers ask for beyond one task is then its own next one.
    ///
    /// A panic of any task is raised again here, after the join. Nothing is allocated.
    pub fn for_each(&self, tasks: usize, f: impl Fn(usize, usize) + Sync) {
        if tasks <= 1 || self.is_alone() {
            (0..tasks).for_each(|task| f(0, task));
            return;
        }
        let runs = self.threads().min(RUNS_MAX).min(tasks);
        let start = |run: usize| tasks / runs * run + run.min(tasks % runs);
        let next: [Padded<AtomicUsize>; RUNS_MAX] = std::array::from_fn(|run| Padded(AtomicUsize::new(start(run))));
        let claim = |worker: usize| {
            for turn in 0..runs {
                let run = (worker + turn) % runs;
                let end = start(run + 1);
                loop {
                    let task = next[run].0.fetch_add(1, Ordering::Relaxed);
                    if task >= end {
                        break;
                    }
                    f(worker, task);
                }
            }
        };
        self.fork_join(&claim, false);
    }

    /// Whether the calling thread has to do a job by itself.
    fn is_alone(&self) -> bool {
        self.workers.is_empty() || IN_JOB.get()
    }

    /// Runs `f(0)` here and `f(worker)` on the workers: on all of them if `all`, else on those that come before `f(0)` returns.
    fn fork_join(&self, f: &(dyn Fn(usize) + Sync), all: bool) {
        let shared = &*self.shared;
        let one_job_at_a_time = lock(&self.caller);
        let job: *const (dyn Fn(usize) + Sync + '_) = f;
        // SAFETY: only the lifetime changes. Workers use the pointer only while they are inside the gate, and this function does not
        // return or unwind before the gate is closed and nobody is inside, so `f` outlives every use.
        let job: Job = unsafe { std::mem::transmute(job) };
        // SAFETY: the lock is held, the gate is closed and nobody is inside: no worker reads the cell before the gate opens.
        unsafe { *shared.job.get() = Some(job) };
        shared.remaining.0.store(self.workers.len(), Ordering::Relaxed);
        // Sequentially consistent with the worker's "set parked, then look at the gate": one of the two sees the other.
        let gate = Gate(shared.gate.0.load(Ordering::Relaxed)).next();
        shared.gate.0.store(gate.0, Ordering::SeqCst);
        for (thread, parked) in self.handles.iter().zip(&shared.parked) {
            if parked.0.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| in_job(|| f(0))));
        if all {
            shared.wait_until(|| shared.remaining.0.load(Ordering::Acquire) == 0);
        }
        shared.gate.0.fetch_and(!Gate::OPEN, Ordering::Relaxed);
        shared.wait_until(|| Gate(shared.gate.0.load(Ordering::Acquire)).inside() == 0);
        let theirs = lock(&shared.panic).take();
        drop(one_job_at_a_time);
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Calls `f(worker, index, chunk)` once for each run of `chunk_len` elements of `data`, the last of which may be shorter.
    pub fn for_each_chunk<T: Send>(&self, data: &mut [T], chunk_len: usize, f: impl Fn(usize, usize, &mut [T]) + Sync) {
        assert!(chunk_len > 0 || data.is_empty(), "chunks have elements");
        /// The start of the data; only [`Pool::for_each_chunk`] makes slices of it.
        struct Start<T>(*mut T);
        // SAFETY: a task takes the elements of its own chunk from it and no others, and `T: Send` lets another thread have them.
        unsafe impl<T: Send> Sync for Start<T> {}
        let (start, len) = (Start(data.as_mut_ptr()), data.len());
        let start = &start;
        self.for_each(len.div_ceil(chunk_len.max(1)), |worker, index| {
            let first = index * chunk_len;
            // SAFETY: each index is handed out once, so chunks do not overlap; they lie within `data`, which outlives this call.
            let chunk = unsafe { std::slice::from_raw_parts_mut(start.0.add(first), chunk_len.min(len - first)) };
            f(worker, index, chunk);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        let gate = Gate(self.shared.gate.0.load(Ordering::Relaxed)).next();
        self.shared.gate.0.store(gate.0, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its jobs, so a failed join has nothing to report.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Shared {
    /// Waits for other threads of the pool, which are at work.
    fn wait_until(&self, done: impl Fn() -> bool) {
        let mut spins = if self.may_spin { 0 } else { JOIN_SPINS_MAX };
        while !done() {
            if spins < JOIN_SPINS_MAX {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }

    /// Enters the current job if it is open and not number `seen`, which becomes its number.
    fn try_enter(&self, seen: &mut u64) -> bool {
        let mut gate = Gate(self.gate.0.load(Ordering::SeqCst));
        while gate.job() != *seen && gate.is_open() {
            let entered = gate.0 + 1;
            match self.gate.0.compare_exchange_weak(gate.0, entered, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    *seen = gate.job();
                    return true;
                }
                Err(now) => gate = Gate(now),
            }
        }
        false
    }

    /// Waits for a job other than `seen` and enters it: spins, yields, then parks.
    fn enter(&self, worker: usize, seen: &mut u64) {
        let spins = if self.may_spin { IDLE_SPINS_MAX } else { 0 };
        for _ in 0..spins {
            if self.try_enter(seen) {
                return;
            }
            std::hint::spin_loop();
        }
        for _ in 0..IDLE_YIELDS_MAX {
            if self.try_enter(seen) {
                return;
            }
            thread::yield_now();
        }
        let parked = &self.parked[worker - 1].0;
        parked.store(true, Ordering::SeqCst);
        while !self.try_enter(seen) {
            thread::park();
        }
        parked.store(false, Ordering::SeqCst);
    }
}

/// Life of worker thread number `worker`.
fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        shared.enter(worker, &mut seen);
        if shared.shutdown.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: this worker is inside the gate, so the job was written before and is not replaced until it leaves.
        let job = unsafe { *shared.job.get() };
        if let Some(job) = job {
            // SAFETY: the call that made the job keeps the closure alive while a worker is inside the gate.
            let job = unsafe { &*job };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| in_job(|| job(worker)))) {
                lock(&shared.panic).get_or_insert(payload);
            }
        }
        shared.remaining.0.fetch_sub(1, Ordering::Release);
        shared.gate.0.fetch_sub(1, Ordering::Release);
    }
}

/// Marks this thread as inside a job while `f` runs.
fn in_job(f: impl FnOnce()) {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            IN_JOB.set(false);
        }
    }
    IN_JOB.set(true);
    let _reset = Reset;
    f();
}

/// Locks whatever a panic may have left behind: the data of these locks is valid at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Distinct sets of sibling hardware threads that the kernel lists; `None` where it does not say.
fn physical_cores() -> Option<usize> {
    let mut siblings = Vec::new();
    for entry in std::fs::read_dir("/sys/devices/system/cpu").ok()? {
        let name = entry.ok()?.file_name();
        let Some(index) = name.to_str().and_then(|name| name.strip_prefix("cpu")) else { continue };
        if index.parse::<u32>().is_err() {
            continue;
        }
        // A core that is offline has no topology.
        let list = format!("/sys/devices/system/cpu/cpu{index}/topology/thread_siblings_list");
        if let Ok(list) = std::fs::read_to_string(list) {
            siblings.push(list);
        }
    }
    siblings.sort_unstable();
    siblings.dedup();
    (!siblings.is_empty()).then_some(siblings.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREAD_COUNTS: [usize; 4] = [1, 2, 3, 7];

    #[test]
    fn run_calls_each_worker_once() {
        for threads in THREAD_COUNTS {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..300 {
                pool.run(|worker| {
                    calls[worker].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == 300));
        }
    }

    #[test]
    fn for_each_calls_each_task_once() {
        for threads in THREAD_COUNTS {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 5, 100] {
                let calls: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(tasks, |worker, task| {
                    assert!(worker < threads);
                    calls[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_parked_worker_wakes() {
        let pool = Pool::new(2);
        for _ in 0..3 {
            thread::sleep(std::time::Duration::from_millis(20));
            let count = AtomicUsize::new(0);
            pool.run(|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 2);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        for threads in THREAD_COUNTS {
            let pool = Pool::new(threads);
            for culprit in 0..threads {
                let finished = AtomicUsize::new(0);
                let result = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(|worker| {
                        if worker == culprit {
                            std::panic::panic_any(culprit);
                        }
                        finished.fetch_add(1, Ordering::Relaxed);
                    })
                }));
                assert_eq!(result.unwrap_err().downcast_ref::<usize>(), Some(&culprit));
                if threads > 1 {
                    assert_eq!(finished.into_inner(), threads - 1);
                }
            }
            let count = AtomicUsize::new(0);
            pool.run(|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), threads);
        }
    }

    #[test]
    fn nested_and_concurrent_calls_complete() {
        let pool = Pool::new(3);
        let count = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.run(|_| {
                            pool.for_each(4, |_, _| {
                                count.fetch_add(1, Ordering::Relaxed);
                            })
                        });
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 3 * 50 * 3 * 4);
    }

    #[test]
    fn default_threads_is_within_the_machine() {
        let usable = thread::available_parallelism().unwrap().get();
        assert!((1..=usable).contains(&Pool::default_threads()));
    }
}
