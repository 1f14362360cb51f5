//! GGUF v2 and v3, read in place from a memory map.
//!
//! A GGUF file is foreign input. Every count, length and offset is checked against the bytes that are really there before anything is
//! allocated or sliced; metadata arrays stay where they are in the file and are decoded when they are iterated.
//!
//! Layout, all little-endian: `"GGUF"`, version `u32`, tensor count `u64`, metadata count `u64`, the metadata pairs, the tensor
//! directory, padding to the alignment, the tensor data.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use forebay_kernels::WeightType;
use memmap2::Mmap;

use super::error::{ModelError, Result};

/// A model of 1,000 layers with 20 tensors each has 20,000; above this a count is damage, not a model.
const TENSOR_COUNT_MAX: u64 = 1 << 17;
/// Published files have 20 to 60 pairs.
const METADATA_COUNT_MAX: u64 = 1 << 16;
/// Bytes of a metadata key (the format's own limit).
const KEY_BYTES_MAX: u64 = 65_535;
/// Bytes of a tensor name (the format allows 64; some writers go beyond).
const NAME_BYTES_MAX: u64 = 256;
/// Arrays of arrays of arrays are nowhere in use; the bound keeps recursion finite.
const ARRAY_DEPTH_MAX: usize = 4;
/// The format's limit.
const DIMENSIONS_MAX: u32 = 4;
/// The format's default for `general.alignment`.
const ALIGNMENT_DEFAULT: u64 = 32;
/// An alignment above this is damage.
const ALIGNMENT_MAX: u64 = 1 << 24;
/// The shortest possible metadata pair: key length, type, one byte.
const METADATA_PAIR_BYTES_MIN: u64 = 8 + 4 + 1;
/// The shortest possible directory entry: name length, dimension count, one dimension, type, offset.
const TENSOR_ENTRY_BYTES_MIN: u64 = 8 + 4 + 8 + 4 + 8;

/// What is wrong with the bytes of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum GgufError {
    #[error("not a GGUF file: starts with bytes {found:02x?}, expected \"GGUF\"")]
    Magic { found: Vec<u8> },
    #[error("GGUF version {found} is not supported, expected 2 or 3")]
    Version { found: u32 },
    #[error("big-endian GGUF file (version {version} in the other byte order), expected little-endian")]
    BigEndian { version: u32 },
    #[error("truncated: {what} at byte {offset} needs {needed} bytes, the file has {available} left")]
    Truncated { what: &'static str, offset: u64, needed: u64, available: u64 },
    #[error("{what} is {found}, expected at most {limit}")]
    Count { what: &'static str, found: u64, limit: u64 },
    #[error("{what} at byte {offset} is not UTF-8, expected text")]
    Utf8 { what: &'static str, offset: u64 },
    #[error("metadata key {key:?} stands there twice, expected once")]
    DuplicateKey { key: String },
    #[error("metadata key {key:?} has value type {found}, expected 0 to 12")]
    ValueType { key: String, found: u32 },
    #[error("metadata key {key:?} nests arrays deeper than {limit}, expected at most {limit} levels")]
    ArrayDepth { key: String, limit: usize },
    #[error("general.alignment is {found}, expected a power of two from 8 to {ALIGNMENT_MAX}")]
    Alignment { found: String },
    #[error("tensor {name:?} stands in the directory twice, expected once")]
    DuplicateTensor { name: String },
    #[error("tensor name at byte {offset} is {found} bytes long, expected 1 to {NAME_BYTES_MAX}")]
    NameLength { offset: u64, found: u64 },
    #[error("tensor {name:?} has {found} dimensions, expected 1 to {DIMENSIONS_MAX}")]
    DimensionCount { name: String, found: u32 },
    #[error("tensor {name:?} has dimensions {found:?}, expected each above 0 and a size that fits in the file")]
    Dimensions { name: String, found: Vec<u64> },
    #[error("tensor {name:?} has type {found}, expected one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K")]
    TensorType { name: String, found: String },
    #[error("tensor {name:?} has rows of {found} values, expected a multiple of {block} for {dtype}")]
    RowLength { name: String, found: u64, block: u64, dtype: &'static str },
    #[error("tensor {name:?} starts at offset {found}, expected a multiple of the alignment {alignment}")]
    Misaligned { name: String, found: u64, alignment: u64 },
    #[error("tensor {name:?} needs {needed} bytes at byte {offset}, the file ends at byte {file_bytes}: truncated or damaged")]
    BeyondEnd { name: String, offset: u64, needed: u64, file_bytes: u64 },
    #[error("tensors {first:?} and {second:?} overlap, expected each to have its own bytes")]
    Overlap { first: String, second: String },
}

/// The number that a storage type has in the file.
const TYPE_CODES: [(u32, WeightType); 11] = [
    (0, WeightType::F32),
    (1, WeightType::F16),
    (2, WeightType::Q4_0),
    (3, WeightType::Q4_1),
    (6, WeightType::Q5_0),
    (7, WeightType::Q5_1),
    (8, WeightType::Q8_0),
    (12, WeightType::Q4K),
    (13, WeightType::Q5K),
    (14, WeightType::Q6K),
    (30, WeightType::BF16),
];

/// Names of ggml types that are known but not supported, so that an error can say what was found.
fn type_name(code: u32) -> String {
    const OTHERS: &[(u32, &str)] = &[
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
    ];
    match OTHERS.iter().find(|(known, _)| *known == code) {
        Some((_, name)) => (*name).to_string(),
        None => format!("number {code}, which nobody has defined"),
    }
}

/// One entry of the tensor directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, as in `blk.0.attn_q.weight`.
    pub name: String,
    /// Dimensions, the fastest-moving first: a matrix `[rows][cols]` stands here as `[cols, rows]`.
    pub dims: Vec<u64>,
    /// The storage type.
    pub dtype: WeightType,
    /// Offset from the start of the data section, as in the file.
    pub offset: u64,
    bytes: Range<usize>,
}

impl TensorInfo {
    /// Bytes of the tensor's data.
    pub fn byte_count(&self) -> usize {
        self.bytes.len()
    }
}

/// The type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the format's own names")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of a value of fixed width; `None` for strings and arrays.
    fn width(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

/// Where a metadata value lies in the file.
#[derive(Debug, Clone)]
struct Slot {
    dtype: ValueType,
    /// For an array: its element type and count; `bytes` is then the elements.
    array: Option<(ValueType, u64)>,
    bytes: Range<usize>,
}

/// A metadata value, borrowed from the map.
#[derive(Debug, Clone, Copy)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Either float.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string; its bytes need not be UTF-8.
    String(&'a [u8]),
    /// An array.
    Array(Array<'a>),
}

/// An array of the metadata, decoded as it is iterated.
#[derive(Debug, Clone, Copy)]
pub struct Array<'a> {
    /// The type of the elements.
    pub element: ValueType,
    /// How many there are; checked against the file.
    pub count: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The elements in order. Elements of nested arrays are skipped, not decoded.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut rest = self.bytes;
        let element = self.element;
        (0..self.count).map_while(move |_| take_value(&mut rest, element))
    }
}

/// Decodes one value of a region that the parser has already walked over; `None` would mean that it had not.
fn take_value<'a>(rest: &mut &'a [u8], dtype: ValueType) -> Option<Value<'a>> {
    fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
        let (head, tail) = rest.split_at_checked(count)?;
        *rest = tail;
        Some(head)
    }
    macro_rules! number {
        ($t:ty) => {
            <$t>::from_le_bytes(take(rest, size_of::<$t>())?.try_into().ok()?)
        };
    }
    Some(match dtype {
        ValueType::U8 => Value::Unsigned(number!(u8).into()),
        ValueType::I8 => Value::Signed(number!(i8).into()),
        ValueType::U16 => Value::Unsigned(number!(u16).into()),
        ValueType::I16 => Value::Signed(number!(i16).into()),
        ValueType::U32 => Value::Unsigned(number!(u32).into()),
        ValueType::I32 => Value::Signed(number!(i32).into()),
        ValueType::F32 => Value::Float(number!(f32).into()),
        ValueType::Bool => Value::Bool(number!(u8) != 0),
        ValueType::U64 => Value::Unsigned(number!(u64)),
        ValueType::I64 => Value::Signed(number!(i64)),
        ValueType::F64 => Value::Float(number!(f64)),
        ValueType::String => {
            let length = usize::try_from(number!(u64)).ok()?;
            Value::String(take(rest, length)?)
        }
        ValueType::Array => {
            let element = ValueType::from_code(number!(u32))?;
            let count = usize::try_from(number!(u64)).ok()?;
            let start = *rest;
            for _ in 0..count {
                take_value(rest, element)?;
            }
            Value::Array(Array { element, count, bytes: &start[..start.len() - rest.len()] })
        }
    })
}

/// The parsed head of a GGUF file: metadata and tensor directory, without the bytes themselves.
#[derive(Debug)]
struct Directory {
    version: u32,
    metadata: HashMap<String, Slot>,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
}

/// Walks the file from the start; every read is checked against its end.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, count: u64, what: &'static str) -> Result<&'a [u8], GgufError> {
        if count > self.left() {
            return Err(GgufError::Truncated { what, offset: self.at as u64, needed: count, available: self.left() });
        }
        let start = self.at;
        self.at += count as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        let low = self.u32(what)?;
        let high = self.u32(what)?;
        Ok(u64::from(low) | u64::from(high) << 32)
    }

    fn text(&mut self, limit: u64, what: &'static str) -> Result<&'a str, GgufError> {
        let offset = self.at as u64;
        let length = self.u64(what)?;
        if length > limit {
            return Err(GgufError::Count { what, found: length, limit });
        }
        std::str::from_utf8(self.take(length, what)?).map_err(|_| GgufError::Utf8 { what, offset })
    }

    /// Moves past one value and says where it lies.
    fn value(&mut self, key: &str, dtype: ValueType, depth: usize) -> Result<Slot, GgufError> {
        if let Some(width) = dtype.width() {
            let start = self.at;
            self.take(width, "metadata value")?;
            return Ok(Slot { dtype, array: None, bytes: start..self.at });
        }
        if dtype == ValueType::String {
            let length = self.u64("metadata string length")?;
            let start = self.at;
            self.take(length, "metadata string")?;
            return Ok(Slot { dtype, array: None, bytes: start..self.at });
        }
        if depth == ARRAY_DEPTH_MAX {
            return Err(GgufError::ArrayDepth { key: key.to_string(), limit: ARRAY_DEPTH_MAX });
        }
        let element = self.value_type(key)?;
        let count = self.u64("metadata array length")?;
        let start = self.at;
        match element.width() {
            Some(width) => {
                let needed = count.saturating_mul(width);
                self.take(needed, "metadata array")?;
            }
            None => {
                // A string takes at least its length field, an array its type and count: more elements than that cannot be there.
                let limit = self.left() / 8;
                if count > limit {
                    return Err(GgufError::Count { what: "length of a metadata array", found: count, limit });
                }
                for _ in 0..count {
                    self.value(key, element, depth + 1)?;
                }
            }
        }
        Ok(Slot { dtype, array: Some((element, count)), bytes: start..self.at })
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, GgufError> {
        let code = self.u32("metadata value type")?;
        ValueType::from_code(code).ok_or_else(|| GgufError::ValueType { key: key.to_string(), found: code })
    }
}

impl Directory {
    fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        if !bytes.starts_with(b"GGUF") {
            return Err(GgufError::Magic { found: bytes[..bytes.len().min(4)].to_vec() });
        }
        let mut cursor = Cursor { bytes, at: 4 };
        let version = cursor.u32("version")?;
        match version {
            2 | 3 => {}
            found if (1..=3).contains(&found.swap_bytes()) => {
                return Err(GgufError::BigEndian { version: found.swap_bytes() });
            }
            found => return Err(GgufError::Version { found }),
        }
        let tensor_count = cursor.u64("tensor count")?;
        let metadata_count = cursor.u64("metadata count")?;
        for (what, found, bound, entry) in [
            ("tensor count", tensor_count, TENSOR_COUNT_MAX, TENSOR_ENTRY_BYTES_MIN),
            ("metadata count", metadata_count, METADATA_COUNT_MAX, METADATA_PAIR_BYTES_MIN),
        ] {
            let limit = bound.min(cursor.left() / entry);
            if found > limit {
                return Err(GgufError::Count { what, found, limit });
            }
        }

        let mut metadata = HashMap::with_capacity(metadata_count as usize);
        for _ in 0..metadata_count {
            let key = cursor.text(KEY_BYTES_MAX, "metadata key")?;
            let dtype = cursor.value_type(key)?;
            let slot = cursor.value(key, dtype, 0)?;
            if metadata.insert(key.to_string(), slot).is_some() {
                return Err(GgufError::DuplicateKey { key: key.to_string() });
            }
        }
        let alignment = alignment(bytes, &metadata)?;

        let mut tensors = Vec::with_capacity(tensor_count as usize);
        let mut index = HashMap::with_capacity(tensor_count as usize);
        for position in 0..tensor_count as usize {
            let info = tensor_entry(&mut cursor, alignment)?;
            if index.insert(info.name.clone(), position).is_some() {
                return Err(GgufError::DuplicateTensor { name: info.name });
            }
            tensors.push(info);
        }
        let data_start = (cursor.at as u64).next_multiple_of(alignment);
        for tensor in &mut tensors {
            place(tensor, data_start, bytes.len() as u64)?;
        }
        let mut order: Vec<&TensorInfo> = tensors.iter().collect();
        order.sort_by_key(|tensor| tensor.bytes.start);
        for pair in order.windows(2) {
            if pair[0].bytes.end > pair[1].bytes.start {
                return Err(GgufError::Overlap { first: pair[0].name.clone(), second: pair[1].name.clone() });
            }
        }
        Ok(Self { version, metadata, tensors, index })
    }
}

/// `general.alignment`, which every tensor offset is a multiple of.
fn alignment(bytes: &[u8], metadata: &HashMap<String, Slot>) -> Result<u64, GgufError> {
    let Some(slot) = metadata.get("general.alignment") else {
        return Ok(ALIGNMENT_DEFAULT);
    };
    if slot.dtype != ValueType::U32 {
        return Err(GgufError::Alignment { found: format!("of type {:?}", slot.dtype) });
    }
    match take_value(&mut &bytes[slot.bytes.clone()], slot.dtype) {
        Some(Value::Unsigned(found)) if found.is_power_of_two() && (8..=ALIGNMENT_MAX).contains(&found) => Ok(found),
        Some(Value::Unsigned(found)) => Err(GgufError::Alignment { found: found.to_string() }),
        _ => Err(GgufError::Alignment { found: "unreadable".to_string() }),
    }
}

/// Reads one directory entry; its place in the file is set by [`place`].
fn tensor_entry(cursor: &mut Cursor<'_>, alignment: u64) -> Result<TensorInfo, GgufError> {
    let offset = cursor.at as u64;
    let length = cursor.u64("tensor name length")?;
    if length == 0 || length > NAME_BYTES_MAX {
        return Err(GgufError::NameLength { offset, found: length });
    }
    let name = std::str::from_utf8(cursor.take(length, "tensor name")?)
        .map_err(|_| GgufError::Utf8 { what: "tensor name", offset })?
        .to_string();
    let dimension_count = cursor.u32("tensor dimension count")?;
    if dimension_count == 0 || dimension_count > DIMENSIONS_MAX {
        return Err(GgufError::DimensionCount { name, found: dimension_count });
    }
    let mut dims = Vec::with_capacity(dimension_count as usize);
    for _ in 0..dimension_count {
        dims.push(cursor.u64("tensor dimension")?);
    }
    let code = cursor.u32("tensor type")?;
    let Some(&(_, dtype)) = TYPE_CODES.iter().find(|(known, _)| *known == code) else {
        return Err(GgufError::TensorType { name, found: type_name(code) });
    };
    let offset = cursor.u64("tensor offset")?;
    if offset % alignment != 0 {
        return Err(GgufError::Misaligned { name, found: offset, alignment });
    }
    Ok(TensorInfo { name, dims, dtype, offset, bytes: 0..0 })
}

/// Works out a tensor's bytes and checks that the file has them.
fn place(tensor: &mut TensorInfo, data_start: u64, file_bytes: u64) -> Result<(), GgufError> {
    let dimensions = |tensor: &TensorInfo| GgufError::Dimensions { name: tensor.name.clone(), found: tensor.dims.clone() };
    let (block_values, block_bytes) = (tensor.dtype.block_len() as u64, tensor.dtype.block_bytes() as u64);
    let row = tensor.dims[0];
    let values = tensor.dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let Some(values) = values.filter(|&values| values > 0) else {
        return Err(dimensions(tensor));
    };
    if row % block_values != 0 {
        let (name, dtype) = (tensor.name.clone(), tensor.dtype.name());
        return Err(GgufError::RowLength { name, found: row, block: block_values, dtype });
    }
    let Some(needed) = (values / block_values).checked_mul(block_bytes) else {
        return Err(dimensions(tensor));
    };
    let offset = data_start.saturating_add(tensor.offset);
    match offset.checked_add(needed) {
        Some(end) if end <= file_bytes => tensor.bytes = offset as usize..end as usize,
        _ => return Err(GgufError::BeyondEnd { name: tensor.name.clone(), offset, needed, file_bytes }),
    }
    Ok(())
}

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

/// What a value is, for an error message.
fn describe(value: Value<'_>) -> String {
    match value {
        Value::Unsigned(value) => format!("the integer {value}"),
        Value::Signed(value) => format!("the integer {value}"),
        Value::Float(value) => format!("the number {value}"),
        Value::Bool(value) => format!("{value}"),
        Value::String(_) => "a string".to_string(),
        Value::Array(array) => format!("an array of {} values of type {:?}", array.count, array.element),
    }
}
