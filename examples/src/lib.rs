//! Shared parts of the programs: command-line options, exit codes, interruption, input and output, the JSON report.
//!
//! The programs are `forebay-generate`, `forebay-summarize` and `forebay-bench`; `forebay-tune` uses the same parts.

pub mod bench;
pub mod cli;
pub mod generate;
pub mod input;
pub mod interrupt;
pub mod output;
pub mod program;
pub mod progress;
pub mod report;
pub mod size;
pub mod split;
pub mod summarize;

pub use program::{Failure, Outcome};
