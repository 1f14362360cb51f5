//! GGUF files from metadata and tensors: for tests, and for models of random weights.

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Meta {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    U64(u64),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    /// A value type and bytes as they are, right or wrong.
    Raw(u32, Vec<u8>),
}

/// One tensor as it is written.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub struct TensorEntry {
    pub name: String,
    pub dims: Vec<u64>,
    pub code: u32,
    /// Bytes of its data.
    pub size: usize,
    /// The data, if [`GgufWriter::finish`] is to write it.
    pub data: Vec<u8>,
    /// Written instead of the true offset.
    pub offset: Option<u64>,
}

/// Puts a GGUF file together. Its fields are open, so that a test of the reader can break them.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub struct GgufWriter {
    pub version: u32,
    pub alignment: usize,
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<TensorEntry>,
    /// Written instead of the true counts: tensors, metadata.
    pub counts: Option<(u64, u64)>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufWriter {
    /// An empty file of version 3.
    pub fn new() -> Self {
        Self { version: 3, alignment: 32, metadata: Vec::new(), tensors: Vec::new(), counts: None }
    }

    /// Sets a metadata value, in place of an older one of the same key.
    pub fn set(&mut self, key: &str, value: Meta) {
        match self.metadata.iter_mut().find(|(known, _)| known == key) {
            Some(pair) => pair.1 = value,
            None => self.metadata.push((key.to_string(), value)),
        }
    }

    /// Removes a metadata value.
    pub fn remove(&mut self, key: &str) {
        self.metadata.retain(|(known, _)| known != key);
    }

    /// Adds a tensor; `dims` are in the file's order, the fastest-moving first.
    pub fn tensor(&mut self, name: &str, dims: &[u64], code: u32, data: Vec<u8>) {
        self.announce(name, dims, code, data.len());
        if let Some(entry) = self.tensors.last_mut() {
            entry.data = data;
        }
    }

    /// Adds a tensor of `size` bytes whose data [`GgufWriter::finish_with`] will be given.
    pub fn announce(&mut self, name: &str, dims: &[u64], code: u32, size: usize) {
        let (name, dims) = (name.to_string(), dims.to_vec());
        self.tensors.push(TensorEntry { name, dims, code, size, data: Vec::new(), offset: None });
    }

    /// The entry of a tensor that was added.
    pub fn entry(&mut self, name: &str) -> Option<&mut TensorEntry> {
        self.tensors.iter_mut().find(|entry| entry.name == name)
    }

    /// The bytes of the file.
    pub fn finish(&self) -> Vec<u8> {
        self.finish_with(|entry, out| out[..entry.data.len()].copy_from_slice(&entry.data))
    }

    /// The bytes of the file, the data of each tensor written by `fill` where it stands. The file exists once in memory.
    pub fn finish_with(&self, mut fill: impl FnMut(&TensorEntry, &mut [u8])) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        let (tensors, pairs) = self.counts.unwrap_or((self.tensors.len() as u64, self.metadata.len() as u64));
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(pairs.to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut bytes, key);
            meta(&mut bytes, value);
        }
        let mut offset = 0u64;
        for entry in &self.tensors {
            text(&mut bytes, &entry.name);
            bytes.extend((entry.dims.len() as u32).to_le_bytes());
            entry.dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
            bytes.extend(entry.code.to_le_bytes());
            bytes.extend(entry.offset.unwrap_or(offset).to_le_bytes());
            offset += entry.size.next_multiple_of(self.alignment) as u64;
        }
        let mut at = bytes.len();
        let end = self.tensors.iter().fold(at, |end, entry| end.next_multiple_of(self.alignment) + entry.size);
        bytes.reserve_exact(end - at);
        bytes.resize(end, 0);
        for entry in &self.tensors {
            at = at.next_multiple_of(self.alignment);
            fill(entry, &mut bytes[at..at + entry.size]);
            at += entry.size;
        }
        bytes
    }
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn meta(bytes: &mut Vec<u8>, value: &Meta) {
    let mut put = |code: u32, value: &[u8]| {
        bytes.extend(code.to_le_bytes());
        bytes.extend(value);
    };
    match value {
        Meta::U32(value) => put(4, &value.to_le_bytes()),
        Meta::I32(value) => put(5, &value.to_le_bytes()),
        Meta::F32(value) => put(6, &value.to_le_bytes()),
        Meta::Bool(value) => put(7, &[u8::from(*value)]),
        Meta::U64(value) => put(10, &value.to_le_bytes()),
        Meta::Raw(code, value) => put(*code, value),
        Meta::Text(value) => {
            put(8, &[]);
            text(bytes, value);
        }
        Meta::Texts(values) => {
            put(9, &8u32.to_le_bytes());
            bytes.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| text(bytes, value));
        }
        Meta::I32s(values) => {
            put(9, &5u32.to_le_bytes());
            bytes.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        }
    }
}
