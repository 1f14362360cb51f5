//! Completions that are not to be seen yet, for the devices that change the timing of another.

use std::time::{Duration, Instant};

use super::device::Completion;

/// The last part of a wait is spun: a sleeping thread wakes this much too late.
const SPIN: Duration = Duration::from_micros(50);

/// Completions and the time from which they may be seen.
pub(crate) struct Held(Vec<(Instant, Completion)>);

impl Held {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self(Vec::with_capacity(capacity))
    }

    pub(crate) fn push(&mut self, due: Instant, completion: Completion) {
        self.0.push((due, completion));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.0.iter().map(|&(due, _)| due).min()
    }

    /// Appends what is due.
    pub(crate) fn deliver(&mut self, now: Instant, done: &mut Vec<Completion>) {
        done.extend(self.0.extract_if(.., |&mut (due, _)| due <= now).map(|(_, completion)| completion));
    }
}

/// Sleeps, then spins, until `due`.
pub(crate) fn sleep_until(due: Instant) {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if left > SPIN {
            std::thread::sleep(left - SPIN);
        } else {
            std::hint::spin_loop();
        }
    }
}
