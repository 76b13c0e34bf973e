//! File work under a policy: what the process that does it is asked and answers, and that process.
//!
//! It is confined once, before the first request, and does for each what [`crate::fs`] does
//! elsewhere. Whatever a path leads to there, the kernel decides: no path is checked by us. Open
//! files go back as descriptors.
//!
//! ```text
//! frame: length of head, length of tail (u32 each), head (postcard), tail (content to be written)
//! ```

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::fs::{FsRequest, OpenMode};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::plan::Text;
use crate::fs::wire::path_of;
use crate::fs::{self, Answer, Directory, FsError, Letter, Links, OpenFile, Walked};
use crate::sys::confine;

/// More than any request or answer has.
const MAX_FRAME_BYTES: usize = 1 << 30;

/// Descriptors that a frame may bring.
const MAX_DESCRIPTORS: usize = 2;

/// What is to be done.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// A request of the wire; the content of `fs/writeFile` is the tail.
    Call {
        method: String,
        /// As JSON.
        params: String,
        /// The content of a file of at most so many bytes is the answer to `fs/readFile`; a longer one is
        /// opened.
        most: u32,
    },
    Open(Text, OpenMode),
    /// With the directory and the file.
    Place(Text, Letter),
}

impl Request {
    pub(super) fn call(request: &FsRequest, most: u32) -> Self {
        Self::Call {
            method: request.method().to_owned(),
            params: request.encode(),
            most,
        }
    }
}

/// What came of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The result, as JSON. With a descriptor of the entry for `fs/getMetadata`: owners are seen through
    /// the namespace of the process that looks.
    Response(String),
    /// With the file.
    File,
    /// With the content.
    Content,
    /// With the directory and the file.
    Aside(Letter),
    Placed,
    Directory(Directory),
    Walked(Walked),
    Failed(FsError),
    /// Something of the view is gone: the host has replaced what it lay on. Nothing was done.
    Stale,
}

/// Sends a frame.
pub(super) fn send(
    socket: impl AsFd,
    head: &impl Serialize,
    tail: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_with(socket, head, tail, descriptors, SendFlags::NOSIGNAL)
}

/// As [`send`], for what surely fits: fails rather than waits.
pub(super) fn send_at_once(socket: impl AsFd, head: &impl Serialize) -> io::Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    send_with(socket, head, &[], &[], flags)
}

fn send_with(
    socket: impl AsFd,
    head: &impl Serialize,
    tail: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let mut frame = vec![0; 8];
    frame = postcard::to_extend(head, frame).map_err(io::Error::other)?;
    let length = |bytes: usize| u32::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput);
    let (head_length, tail_length) = (length(frame.len() - 8)?, length(tail.len())?);
    frame[..4].copy_from_slice(&head_length.to_ne_bytes());
    frame[4..8].copy_from_slice(&tail_length.to_ne_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let total = frame.len() + tail.len();
    let mut sent = 0;
    while sent < total {
        let parts = [
            IoSlice::new(frame.get(sent..).unwrap_or_default()),
            IoSlice::new(&tail[sent.saturating_sub(frame.len())..]),
        ];
        match rustix::net::sendmsg(&socket, &parts, &mut ancillary, flags) {
            Ok(bytes) => {
                sent += bytes;
                ancillary.clear();
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A frame that arrived.
#[derive(Debug)]
pub(super) struct Frame<T> {
    pub(super) head: T,
    pub(super) tail: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// The next frame; `None` at the end.
pub(super) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<Frame<T>>> {
    Receiving::new().receive(socket, RecvFlags::empty())
}

fn odd(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// A frame that may have arrived in part.
pub(super) struct Receiving {
    bytes: Vec<u8>,
    filled: usize,
    descriptors: Vec<OwnedFd>,
    /// How long it is, once that is known.
    wanted: Option<usize>,
}

impl Receiving {
    pub(super) fn new() -> Self {
        Self {
            // Most fit; the rest is read when its length is known.
            bytes: vec![0; 8 * 1024],
            filled: 0,
            descriptors: Vec::new(),
            wanted: None,
        }
    }

    /// The frame, or `None` at the end; with [`RecvFlags::DONTWAIT`] it may have to be called again
    /// when there is more.
    pub(super) fn receive<T: DeserializeOwned>(
        &mut self,
        socket: impl AsFd,
        flags: RecvFlags,
    ) -> io::Result<Option<Frame<T>>> {
        let wanted = loop {
            if let Some(total) = self.wanted
                && self.filled >= total
            {
                break total;
            }
            if !self.receive_more(&socket, flags)? {
                return match self.filled {
                    0 => Ok(None),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
        };
        let mut bytes = std::mem::take(&mut self.bytes);
        let head_end = 8 + length_at(&bytes, 0);
        let head = postcard::from_bytes(&bytes[8..head_end]).map_err(|_| odd("odd frame"))?;
        bytes.truncate(wanted);
        bytes.drain(..head_end);
        Ok(Some(Frame {
            head,
            tail: bytes,
            descriptors: std::mem::take(&mut self.descriptors),
        }))
    }

    /// Takes in what is there; false at the end.
    fn receive_more(&mut self, socket: impl AsFd, flags: RecvFlags) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut self.bytes[self.filled..])];
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let received = match rustix::net::recvmsg(&socket, &mut parts, &mut ancillary, flags) {
            Ok(received) => received.bytes,
            Err(Errno::INTR) => return Ok(true),
            Err(Errno::CONNRESET) => 0,
            Err(error) => return Err(error.into()),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.descriptors.extend(fds);
            }
        }
        self.filled += received;
        if self.wanted.is_none() && self.filled >= 8 {
            let total = 8usize
                .saturating_add(length_at(&self.bytes, 0))
                .saturating_add(length_at(&self.bytes, 4));
            if total > MAX_FRAME_BYTES {
                return Err(odd("frame too long"));
            }
            if total > self.bytes.len() {
                self.bytes.resize(total, 0);
            }
            self.wanted = Some(total);
        }
        Ok(received > 0)
    }
}

fn length_at(bytes: &[u8], at: usize) -> usize {
    let word = bytes.get(at..at + 4).unwrap_or(&[0; 4]);
    u32::from_ne_bytes([word[0], word[1], word[2], word[3]]) as usize
}

/// Does file work until nobody asks any more. This process is confined already.
///
/// `laid` are the paths that something of the view lies on.
pub(super) fn serve(socket: &OwnedFd, laid: &[Text]) -> ! {
    let view = View::remember(laid);
    loop {
        let Ok(Some(frame)) = receive::<Request>(socket) else {
            confine::exit(0)
        };
        let sent = if view.is_whole() {
            let done =
                perform(frame, socket).unwrap_or_else(|error| Done::from(Reply::Failed(error)));
            let descriptors: Vec<_> = done.descriptors.iter().map(AsFd::as_fd).collect();
            send(socket, &done.reply, &done.content, &descriptors)
        } else {
            send(socket, &Reply::Stale, &[], &[])
        };
        if sent.is_err() {
            confine::exit(0)
        }
    }
}

/// What the view was made of.
///
/// The host can replace what something lies on: the kernel takes that away then, and what is there
/// now is not covered. A sandbox of a command has the same hole, but does not live on.
struct View(Vec<(PathBuf, Option<u64>)>);

impl View {
    fn remember(laid: &[Text]) -> Self {
        let each = laid.iter().map(|path| {
            let path = path_of(path.clone());
            let mount = mount_at(&path);
            (path, mount)
        });
        Self(each.collect())
    }

    fn is_whole(&self) -> bool {
        self.0.iter().all(|(path, mount)| mount_at(path) == *mount)
    }
}

fn mount_at(path: &Path) -> Option<u64> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(CWD, path, flags, StatxFlags::MNT_ID).ok()?;
    Some(found.stx_mnt_id)
}

/// A reply and what goes with it.
struct Done {
    reply: Reply,
    content: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl From<Reply> for Done {
    fn from(reply: Reply) -> Self {
        Self {
            reply,
            content: Vec::new(),
            descriptors: Vec::new(),
        }
    }
}

impl Done {
    fn with(reply: Reply, descriptors: Vec<OwnedFd>) -> Self {
        Self {
            descriptors,
            ..Self::from(reply)
        }
    }
}

fn perform(frame: Frame<Request>, socket: &OwnedFd) -> Result<Done, FsError> {
    match frame.head {
        Request::Call {
            method,
            params,
            most,
        } => {
            let Some(Ok(mut request)) = FsRequest::decode(&method, &params) else {
                return Err(FsError::Helper(format!("it cannot do `{method}`")));
            };
            if let FsRequest::WriteFile(params) = &mut request {
                params.data_base64 = frame.tail.into();
            }
            call(request, most, socket)
        }
        Request::Open(path, mode) => Ok(match OpenFile::open(&path_of(path), mode)?.send()? {
            fs::Opened::Direct(file) => Done::with(Reply::File, vec![file.into()]),
            fs::Opened::Aside(letter, directory, file) => {
                Done::with(Reply::Aside(letter), vec![directory, file])
            }
        }),
        Request::Place(path, letter) => {
            let Ok([directory, file]) = <[OwnedFd; 2]>::try_from(frame.descriptors) else {
                return Err(FsError::Helper("it was given no file".to_owned()));
            };
            fs::place(&path_of(path), letter, directory, file)?;
            Ok(Reply::Placed.into())
        }
    }
}

fn call(request: FsRequest, most: u32, socket: &OwnedFd) -> Result<Done, FsError> {
    // The server cancels a request by closing its end of the socket.
    let cancelled = || {
        let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
        let now = rustix::event::Timespec::default();
        let _ = rustix::event::poll(&mut fds, Some(&now));
        !fds[0].revents().is_empty()
    };
    let mut descriptors = Vec::new();
    match &request {
        FsRequest::ReadFile(params) if most > 0 => {
            let links = fs::links(params.follow_symlinks);
            return read_file(&fs::native(&params.path)?, links, most);
        }
        FsRequest::GetMetadata(params) => {
            let links = fs::links(params.follow_symlinks);
            // If it cannot be opened, the request itself reports why.
            if let Ok(entry) = fs::entry(&fs::native(&params.path)?, links) {
                descriptors.push(entry.into());
            }
        }
        _ => {}
    }
    Ok(match fs::perform(request, &cancelled)? {
        Answer::File { file, .. } => Done::with(Reply::File, vec![file.into()]),
        Answer::Content(content) => Done {
            content,
            ..Reply::Content.into()
        },
        Answer::Directory { found, .. } => Reply::Directory(found).into(),
        Answer::Walked(walked) => Reply::Walked(walked).into(),
        Answer::Response(response) => Done::with(Reply::Response(response.encode()), descriptors),
    })
}

/// Reads a file of at most so many bytes, or opens it.
fn read_file(path: &Path, links: Links, most: u32) -> Result<Done, FsError> {
    let (file, size) = fs::open_sized(path, links)?;
    if size <= u64::from(most) {
        let size = size as usize;
        // One more shows whether it has grown meanwhile.
        let mut content = vec![0; size + 1];
        if file.read_at(&mut content, 0).is_ok_and(|read| read == size) {
            content.truncate(size);
            return Ok(Done {
                content,
                ..Reply::Content.into()
            });
        }
    }
    // Too long, or not what it was a moment ago.
    Ok(Done::with(Reply::File, vec![file.into()]))
}
