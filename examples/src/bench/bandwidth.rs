//! How fast this machine reads memory: the bound that decode is measured against.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Bytes that each thread reads in a round: far more than its share of any cache.
const THREAD_BYTES: usize = 128 << 20;
/// Rounds; the fastest counts, the others had company.
const ROUNDS: usize = 8;

/// Bytes per second that `threads` threads together read from memory, at best.
pub fn read_bandwidth(threads: usize) -> f64 {
    let threads = threads.max(1);
    let barrier = Barrier::new(threads);
    let seconds = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| worker(&barrier))).collect();
        // A round lasts as long as its slowest thread.
        let mut rounds = [0.0f64; ROUNDS];
        for worker in workers {
            if let Ok(times) = worker.join() {
                for (round, time) in rounds.iter_mut().zip(times) {
                    *round = round.max(time);
                }
            }
        }
        rounds.into_iter().fold(f64::INFINITY, f64::min)
    });
    (threads * THREAD_BYTES) as f64 / seconds
}

/// Seconds of each round of one thread.
fn worker(barrier: &Barrier) -> [f64; ROUNDS] {
    let words = vec![1u64; THREAD_BYTES / size_of::<u64>()];
    let mut seconds = [0.0; ROUNDS];
    for round in &mut seconds {
        barrier.wait();
        let start = Instant::now();
        black_box(sum(black_box(&words)));
        *round = start.elapsed().as_secs_f64();
    }
    seconds
}

/// Many independent sums, so that loads and not additions are what is waited for.
fn sum(words: &[u64]) -> u64 {
    let mut lanes = [0u64; 32];
    for chunk in words.chunks_exact(lanes.len()) {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*word);
        }
    }
    lanes.into_iter().fold(0, u64::wrapping_add)
}
