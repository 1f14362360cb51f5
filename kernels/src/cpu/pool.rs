//! Persistent workers for fork-join over slices.
//!
//! The caller of [`Pool::run`] is worker 0; the others wait for the next job, spinning for a bounded while and then parked. While
//! they spin a fork-join costs about a microsecond, which is what makes the hundreds of joins in one decode step affordable.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Spins before a waiting thread gives its core to others: some tens of microseconds, the length of the serial stretches between
/// two joins of a decode step.
const SPINS_MAX: u32 = 4_000;
/// Yields after the spins before a worker parks. A worker that parks costs the next fork a wake-up of tens of microseconds.
const YIELDS_MAX: u32 = 200;

thread_local! {
    /// Set while this thread runs a job of any pool; a nested call then runs on this thread alone.
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// The job of the current epoch; the lifetime is erased, [`Pool::run`] does not return before all workers are done with it.
type Job = *const (dyn Fn(usize) + Sync);

/// A value on cache lines of its own: the epoch is polled by all workers while others write the neighbours.
#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    /// Number of jobs published so far; a change is the signal to start.
    epoch: Padded<AtomicUsize>,
    /// Workers that have not finished the current job.
    remaining: Padded<AtomicUsize>,
    job: UnsafeCell<Option<Job>>,
    /// One per worker thread: it is parked, or about to be.
    parked: Box<[Padded<AtomicBool>]>,
    shutdown: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    spins_max: u32,
}

// SAFETY: `job` is written only by the holder of `Pool::caller` while no worker runs (`remaining` is 0), and read by workers only
// after they saw the epoch that was stored after the write; everything else is atomic or locked.
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
            epoch: Padded(AtomicUsize::new(0)),
            remaining: Padded(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            parked: (1..threads).map(|_| Padded(AtomicBool::new(false))).collect(),
            shutdown: AtomicBool::new(false),
            panic: Mutex::new(None),
            // With more threads than cores a spinning thread keeps the core from the one it waits for.
            spins_max: if threads > cores { 0 } else { SPINS_MAX },
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
        if self.workers.is_empty() || IN_JOB.get() {
            (0..self.threads()).for_each(f);
            return;
        }
        let _one_job_at_a_time = lock(&self.caller);
        let job: *const (dyn Fn(usize) + Sync + '_) = &f;
        // SAFETY: only the lifetime changes. Workers use the pointer between the epoch store below and their decrement of
        // `remaining`, and this function does not return or unwind before `remaining` is 0, so `f` outlives every use.
        let job: Job = unsafe { std::mem::transmute(job) };
        // SAFETY: the lock is held and `remaining` is 0: no worker reads the cell before it sees the next epoch.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.remaining.0.store(self.workers.len(), Ordering::Relaxed);
        // Sequentially consistent with the worker's "set parked, then look at the epoch": one of the two sees the other.
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (thread, parked) in self.handles.iter().zip(&self.shared.parked) {
            if parked.0.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| in_job(|| f(0))));
        let mut spins = 0;
        while self.shared.remaining.0.load(Ordering::Acquire) != 0 {
            if spins < self.shared.spins_max {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
        let theirs = lock(&self.shared.panic).take();
        drop(_one_job_at_a_time);
        if let Err(payload) = own {
            resume_unwind(payload);
        }
        if let Some(payload) = theirs {
            resume_unwind(payload);
        }
    }

    /// Calls `f(worker, task)` once for each task in `0..tasks`. Workers claim tasks in order as they become free, so which worker
    /// gets which task varies from call to call; a result must not depend on it.
    pub fn for_each(&self, tasks: usize, f: impl Fn(usize, usize) + Sync) {
        if tasks <= 1 {
            (0..tasks).for_each(|task| f(0, task));
            return;
        }
        let next = AtomicUsize::new(0);
        self.run(|worker| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                f(worker, task);
            }
        });
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
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
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

/// Life of worker thread number `worker`.
fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        seen = wait_for_epoch(shared, worker, seen);
        if shared.shutdown.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the epoch was stored after the job, and the job is not replaced before this worker's decrement below.
        let job = unsafe { *shared.job.get() };
        if let Some(job) = job {
            // SAFETY: `Pool::run` keeps the closure alive until `remaining` is 0, which this worker still holds above 0.
            let job = unsafe { &*job };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| in_job(|| job(worker)))) {
                lock(&shared.panic).get_or_insert(payload);
            }
        }
        shared.remaining.0.fetch_sub(1, Ordering::Release);
    }
}

/// Waits until the epoch is not `seen` and returns it: spins, yields, then parks.
fn wait_for_epoch(shared: &Shared, worker: usize, seen: usize) -> usize {
    let changed = || {
        let epoch = shared.epoch.0.load(Ordering::SeqCst);
        (epoch != seen).then_some(epoch)
    };
    for _ in 0..shared.spins_max {
        if let Some(epoch) = changed() {
            return epoch;
        }
        std::hint::spin_loop();
    }
    for _ in 0..YIELDS_MAX {
        if let Some(epoch) = changed() {
            return epoch;
        }
        thread::yield_now();
    }
    let parked = &shared.parked[worker - 1].0;
    parked.store(true, Ordering::SeqCst);
    loop {
        if let Some(epoch) = changed() {
            parked.store(false, Ordering::SeqCst);
            return epoch;
        }
        thread::park();
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
