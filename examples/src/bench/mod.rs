//! `forebay-bench`: measurements that print one table, every row the same work, in one run.

pub mod bandwidth;
pub mod decode;
pub mod io;
pub mod kernels;
pub mod synthetic;
pub mod table;
