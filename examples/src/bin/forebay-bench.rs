//! `forebay-bench`: measures decode, kernels and the store's device.

use clap::{Parser, Subcommand};
use forebay_examples::bench::{decode, io, kernels};
use forebay_examples::{Outcome, program};
use std::process::ExitCode;

/// Measure how fast forebay is on this machine.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Decode speed by context, policy and disk class
    Decode(Box<decode::DecodeArgs>),
    /// Read times of the store's device by size and queue depth
    Io(io::IoArgs),
    /// Each kernel beside the memory's read bandwidth
    Kernels(kernels::KernelsArgs),
}

fn main() -> ExitCode {
    program::run(measure)
}

fn measure(args: Args) -> Outcome<()> {
    match args.what {
        What::Decode(args) => decode::run(*args),
        What::Io(args) => io::run(args),
        What::Kernels(args) => kernels::run(args),
    }
}
