//! `forebay-bench io`: what reads of the store's directory cost, by size and queue depth.

use crate::bench::table::Table;
use crate::cli::{parse_disk, parse_io};
use crate::output::{write_json, write_text};
use crate::program::Outcome;
use crate::size::{format_size, parse_size};
use clap::Args;
use forebay::store::{self, DiskClass, IoBackend, ProfileOptions, ReadSample};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `io`.
#[derive(Args)]
pub struct IoArgs {
    /// Directory whose disk is measured; a nameless file is written there first
    #[arg(long, value_name = "DIR")]
    store: PathBuf,
    /// Slow the disk down to a class of device: native, nvme, ufs, emmc, sdcard
    #[arg(long, value_name = "CLASS", default_value = "native", value_parser = parse_disk)]
    disk: DiskClass,
    /// How to read: auto, uring, pread
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = parse_io)]
    io: IoBackend,
    /// Size of the file that is written and read
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    file_size: u64,
    /// Bytes of a read
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', default_value = "512,4KiB,16KiB,64KiB,256KiB,1MiB", value_parser = parse_read_size)]
    sizes: Vec<u32>,
    /// Reads outstanding
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,4,16,32")]
    depths: Vec<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Sample {
    bytes: u32,
    depth: u32,
    seconds_per_read: f64,
    latency_seconds: f64,
    reads_per_second: f64,
    bytes_per_second: f64,
}

#[derive(Serialize)]
struct IoReport {
    store: String,
    disk: String,
    file_bytes: u64,
    samples: Vec<Sample>,
}

fn parse_read_size(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    u32::try_from(bytes).map_err(|_| format!("{bytes} bytes, expected less than 4GiB"))
}

impl From<&ReadSample> for Sample {
    fn from(sample: &ReadSample) -> Sample {
        Sample {
            bytes: sample.bytes,
            depth: sample.depth,
            seconds_per_read: sample.seconds_per_read,
            latency_seconds: sample.latency_seconds,
            reads_per_second: 1.0 / sample.seconds_per_read,
            bytes_per_second: f64::from(sample.bytes) / sample.seconds_per_read,
        }
    }
}

/// Measures and prints.
pub fn run(args: IoArgs) -> Outcome<()> {
    let options = ProfileOptions {
        backend: args.io,
        throttle: args.disk,
        file_bytes: args.file_size,
        ..ProfileOptions::default()
    };
    let samples = store::profile(&args.store, &args.sizes, &args.depths, &options).map_err(forebay::Error::from)?;
    let report = IoReport {
        store: args.store.display().to_string(),
        disk: args.disk.to_string(),
        file_bytes: args.file_size,
        samples: samples.iter().map(Sample::from).collect(),
    };
    if args.json { write_json(&report) } else { print(&report) }
}

fn print(report: &IoReport) -> Outcome<()> {
    let size = format_size(report.file_bytes);
    write_text(&format!("random reads of a file of {size} in {}, disk {}\n\n", report.store, report.disk))?;
    let mut table = Table::new(0, &["read", "depth", "us/read", "latency us", "reads/s", "MB/s"]);
    for s in &report.samples {
        table.push(vec![
            format_size(s.bytes.into()),
            s.depth.to_string(),
            format!("{:.1}", s.seconds_per_read * 1e6),
            format!("{:.1}", s.latency_seconds * 1e6),
            format!("{:.0}", s.reads_per_second),
            format!("{:.1}", s.bytes_per_second / 1e6),
        ]);
    }
    table.write()
}
