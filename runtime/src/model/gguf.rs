//! GGUF v2 and v3, read in place from a memory map.
//!
//! A GGUF file is foreign input. Every count, length and offset is checked against the bytes that are really there before anything is
//! allocated or sliced; metadata arrays stay where they are in the file and are decoded when they are iterated.
//!
//! Layout, all little-endian: `"GGUF"`, version `u32`, tensor count `u64`, metadata count `u64`, the metadata pairs, the tensor
//! directory, padding to the alignment, the tensor data.

mod error;
mod parse;
mod value;
mod write;

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::error::{ModelError, Result};
use parse::Directory;
use value::{describe, take_value};

pub use error::GgufError;
pub use parse::{TensorInfo, type_code};
pub use value::{Array, Value, ValueType};
pub use write::{GgufWriter, Meta, TensorEntry};

/// The bytes of a file: mapped, or owned where a test or a fuzzer made them.
enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

/// A GGUF file, mapped and checked.
pub struct Gguf {
    path: PathBuf,
    bytes: Bytes,
    directory: Directory,
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf").field("path", &self.path).field("tensors", &self.directory.tensors.len()).finish()
    }
}

impl Gguf {
    /// Maps a file and parses its head. The file must not be changed while it is open: what is mapped is what is computed with.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| ModelError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(io(std::io::Error::other("not a regular file, expected a GGUF file")));
        }
        // SAFETY: the map is private and only read; the caller is told that the file must stay as it is while it is open, and every
        // offset into it is checked against the mapped length.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Self::new(path, Bytes::Mapped(map))
    }

    /// Parses bytes that are already in memory. `path` only names them in errors.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        Self::new(path, Bytes::Owned(bytes))
    }

    fn new(path: &Path, bytes: Bytes) -> Result<Self> {
        let directory = Directory::parse(bytes.as_slice())
            .map_err(|problem| ModelError::Format { path: path.to_path_buf(), problem })?;
        Ok(Self { path: path.to_path_buf(), bytes, directory })
    }

    /// The file's path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.directory.version
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> usize {
        self.bytes.as_slice().len()
    }

    /// The tensor directory, in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.directory.tensors
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_position(name).map(|position| &self.directory.tensors[position])
    }

    /// Where a tensor stands in [`Self::tensors`].
    pub fn tensor_position(&self, name: &str) -> Option<usize> {
        self.directory.index.get(name).copied()
    }

    /// The bytes of a tensor of this file, as they are stored.
    pub fn tensor_bytes(&self, tensor: &TensorInfo) -> &[u8] {
        &self.bytes.as_slice()[tensor.bytes.clone()]
    }

    /// Asks the system to read the file ahead, in the background.
    pub fn read_ahead(&self) {
        if let Bytes::Mapped(map) = &self.bytes
            && let Err(error) = map.advise(memmap2::Advice::WillNeed)
        {
            log::debug!("{}: madvise(WILLNEED): {error}", self.path.display());
        }
    }

    /// A metadata value.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        let slot = self.directory.metadata.get(key)?;
        let mut bytes = &self.bytes.as_slice()[slot.bytes.clone()];
        match (slot.dtype, slot.array) {
            (ValueType::String, _) => Some(Value::String(bytes)),
            (_, Some((element, count))) => Some(Value::Array(Array { element, count: count as usize, bytes })),
            (dtype, None) => take_value(&mut bytes, dtype),
        }
    }

    /// A string, if the key is there.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(bytes)) => match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(_) => Err(self.key_type(key, "a string that is not UTF-8", "UTF-8 text")),
            },
            Some(other) => Err(self.key_type(key, &describe(other), "a string")),
        }
    }

    /// A count, of any integer type, if the key is there.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Unsigned(value)) => Ok(Some(value)),
            Some(Value::Signed(value)) if value >= 0 => Ok(Some(value as u64)),
            Some(other) => Err(self.key_type(key, &describe(other), "an integer of at least 0")),
        }
    }

    /// A number, if the key is there.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Float(value)) => Ok(Some(value)),
            Some(Value::Unsigned(value)) => Ok(Some(value as f64)),
            Some(Value::Signed(value)) => Ok(Some(value as f64)),
            Some(other) => Err(self.key_type(key, &describe(other), "a number")),
        }
    }

    /// A truth value, if the key is there.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.key_type(key, &describe(other), "true or false")),
        }
    }

    /// An array of strings, if the key is there. Each must be UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let array = match self.value(key) {
            None => return Ok(None),
            Some(Value::Array(array)) if array.element == ValueType::String => array,
            Some(other) => return Err(self.key_type(key, &describe(other), "an array of strings")),
        };
        let texts = array.iter().map(|value| match value {
            Value::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        });
        match texts.collect::<Option<Vec<_>>>() {
            Some(texts) => Ok(Some(texts)),
            None => Err(self.key_type(key, "a string that is not UTF-8", "UTF-8 texts")),
        }
    }

    /// An array of integers, if the key is there.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>> {
        let array = match self.value(key) {
            None => return Ok(None),
            Some(Value::Array(array)) => array,
            Some(other) => return Err(self.key_type(key, &describe(other), "an array of integers")),
        };
        let numbers = array.iter().map(|value| match value {
            Value::Unsigned(value) => i64::try_from(value).ok(),
            Value::Signed(value) => Some(value),
            _ => None,
        });
        match numbers.collect::<Option<Vec<_>>>() {
            Some(numbers) => Ok(Some(numbers)),
            None => Err(self.key_type(key, &describe(Value::Array(array)), "an array of integers")),
        }
    }

    fn key_type(&self, key: &str, found: &str, expected: &'static str) -> ModelError {
        ModelError::KeyType { path: self.path.clone(), key: key.to_string(), found: found.to_string(), expected }
    }
}
