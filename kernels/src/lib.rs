//! Arithmetic for forebay, on slices: no files, no models, no threads beyond its own pool.

mod cpu;
mod error;
mod isa;

pub use cpu::pool::Pool;
pub use cpu::{attention, convert, covariance, dense, norm, prefill_attention, rope, select, sketch};
pub use error::KernelError;
pub use isa::Isa;
