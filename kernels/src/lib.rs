//! Arithmetic for forebay, on slices: no files, no models, no threads beyond its own pool.

mod cpu;
mod dtype;
mod error;
mod isa;
mod quant;

pub use cpu::activations::{Activations, Precision};
pub use cpu::gemm::{GemmScratch, gemm};
pub use cpu::gemv::{GemvJob, gemv};
pub use cpu::pool::Pool;
pub use cpu::{attention, convert, covariance, dense, norm, prefill_attention, rope, select, sketch};
pub use dtype::{Weight, WeightType};
pub use error::KernelError;
pub use isa::Isa;
pub use quant::dequantize_rows;
