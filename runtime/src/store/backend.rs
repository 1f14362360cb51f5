//! Which device a file gets.

use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::{Arc, Once};

use forebay_kernels::Pool;

use super::device::{Device, Regions};
use super::faulty::{FaultCounts, FaultOptions, Faulty};
use super::inline::InlineDevice;
use super::pread::PreadDevice;
use super::throttle::Throttled;
use super::uring::UringDevice;
use super::{Alignment, DiskClass, StoreError, UnknownName};

/// How the file is read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoBackend {
    /// io_uring where it works, found by trying; the pool otherwise. On a file system in memory, where a read is a copy, the threads that
    /// compute make it themselves if they are given.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// The `pread` pool.
    Pread,
}

impl FromStr for IoBackend {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "auto" => Ok(Self::Auto),
            "uring" | "io_uring" => Ok(Self::Uring),
            "pread" => Ok(Self::Pread),
            _ => Err(UnknownName { found: name.to_owned(), expected: "auto, uring, pread" }),
        }
    }
}

/// What decides on the device.
pub(crate) struct DeviceOptions {
    pub(crate) backend: IoBackend,
    pub(crate) throttle: DiskClass,
    pub(crate) direct: bool,
    pub(crate) in_memory: bool,
    /// The threads that compute.
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) alignment: Alignment,
    pub(crate) faults: Option<(FaultOptions, FaultCounts)>,
}

/// The device for a file: the one asked for, or the one that suits it; faults and the throttle around it.
pub(crate) fn open_device(
    options: DeviceOptions,
    file: Arc<OwnedFd>,
    regions: &Regions,
    file_bytes: u64,
) -> Result<Box<dyn Device>, StoreError> {
    let DeviceOptions { backend, throttle, direct, in_memory, pool: workers, alignment, faults } = options;
    let ring = |file| -> Result<Box<dyn Device>, StoreError> {
        Ok(Box::new(UringDevice::new(file, regions.clone(), direct, alignment)?))
    };
    let pool = |file| -> Result<Box<dyn Device>, StoreError> {
        Ok(Box::new(PreadDevice::new(file, regions.clone(), direct, alignment)?))
    };
    static SAID: Once = Once::new();
    let mut device = match backend {
        IoBackend::Pread => pool(file)?,
        IoBackend::Uring => ring(file)?,
        IoBackend::Auto => match workers {
            Some(workers) if in_memory => {
                SAID.call_once(|| log::info!("store: pread by the threads that compute (a file system in memory)"));
                Box::new(InlineDevice::new(file, regions.clone(), workers, alignment))
            }
            _ => match ring(Arc::clone(&file)) {
                Ok(device) => {
                    SAID.call_once(|| log::info!("store: io_uring"));
                    device
                }
                Err(e) => {
                    SAID.call_once(|| log::info!("store: pread pool ({e})"));
                    pool(file)?
                }
            },
        },
    };
    if let Some((options, counts)) = faults {
        device = Box::new(Faulty::new(device, regions.clone(), file_bytes, options, counts));
    }
    if let Some(profile) = throttle.profile() {
        device = Box::new(Throttled::new(device, profile));
    }
    Ok(device)
}
