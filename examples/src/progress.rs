//! A progress bar for prefill, on standard error and only where a person watches it.

use crate::interrupt;
use forebay::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// The bar of one prefill; without a terminal it draws nothing.
pub struct PrefillBar {
    bar: ProgressBar,
}

impl PrefillBar {
    /// A bar labelled `what`.
    pub fn new(what: &str) -> PrefillBar {
        let shown = std::io::stderr().is_terminal();
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target).with_message(what.to_string());
        if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:40}] {percent}% {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        PrefillBar { bar }
    }

    /// Takes a report of prefill; `false` stops it, after a signal.
    pub fn update(&mut self, progress: Progress) -> bool {
        self.bar.set_length(progress.total);
        self.bar.set_position(progress.done);
        !interrupt::interrupted()
    }
}

impl Drop for PrefillBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
