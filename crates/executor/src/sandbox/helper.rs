//! Confined file helper: its request protocol and main loop.
//!
//! The helper is confined once, before the first request, and runs the operations of [`crate::fs`].
//! It does not check paths itself: the kernel decides about access to each path. Open files are
//! returned as descriptors.
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
use exec_server_sandbox::placeholder;
use exec_server_sandbox::plan::SystemText;
use exec_server_sandbox::policy::{self, PolicyError, RealDisk};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::fs::wire::{path_of, text};
use crate::fs::{
    self, Directory, FileOutcome, FsError, OpenFile, ProtectedFiles, ReplacementDescription,
    SymlinkPolicy, Walked,
};
use exec_server_sys::confine;

/// Maximum size of a frame, larger than any request or response.
const MAX_FRAME_BYTES: usize = 1 << 30;

/// Maximum number of descriptors attached to a frame.
const MAX_DESCRIPTORS: usize = 2;

/// Request to a helper.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HelperRequest {
    /// The first request: files of the server that no other request may reach.
    Protect(ProtectedFiles),
    /// A request of the client protocol other than `fs/readFile`; the content of `fs/writeFile` is
    /// the tail.
    Call {
        method: String,
        /// JSON text.
        params: String,
    },
    /// `fs/readFile`, without JSON: the most frequent request.
    Read {
        path: SystemText,
        follow_symlinks: bool,
        /// Returns the content of a file of at most this many bytes; a longer file is opened.
        most: u32,
    },
    Open(SystemText, OpenMode, Option<u32>),
    /// With descriptors of the directory and the file.
    Place(SystemText, ReplacementDescription),
}

impl HelperRequest {
    /// Encodes a request; `most` limits the content that `fs/readFile` returns.
    pub(super) fn call(request: &FsRequest, most: u32) -> Result<Self, FsError> {
        Ok(match request {
            FsRequest::ReadFile(params) => Self::Read {
                path: text(&fs::native(&params.path)?),
                follow_symlinks: params.follow_symlinks,
                most,
            },
            _ => Self::Call {
                method: request.method().to_owned(),
                params: request.encode(),
            },
        })
    }
}

/// Response of a helper.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HelperResponse {
    /// The result, as JSON. For `fs/getMetadata`, with a descriptor of the entry: the helper would
    /// see owners through its user namespace, so the server reads them.
    Response(String),
    /// With a descriptor of the file.
    File,
    /// With the content as the tail.
    Content,
    /// With descriptors of the directory and the temporary file.
    Aside(ReplacementDescription),
    Placed,
    Directory(Directory),
    Walked(Walked),
    Failed(FsError),
    /// The host has replaced a file or directory below a mount of the view, which removed the
    /// mount. The request was not run.
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

/// Like [`send`], but fails instead of waiting; for frames that surely fit into the socket buffer.
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

/// Received frame.
#[derive(Debug)]
pub(super) struct HelperFrame<T> {
    pub(super) head: T,
    pub(super) tail: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Receives the next frame; `None` at the end.
pub(super) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
) -> io::Result<Option<HelperFrame<T>>> {
    IncompleteFrame::new().receive(socket, RecvFlags::empty())
}

fn invalid_data(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Frame that may have been received in part.
pub(super) struct IncompleteFrame {
    bytes: Vec<u8>,
    filled: usize,
    descriptors: Vec<OwnedFd>,
    /// Total length, once it is known.
    wanted: Option<usize>,
}

impl IncompleteFrame {
    pub(super) fn new() -> Self {
        Self {
            // Most frames fit; the rest of a longer one is read when its length is known.
            bytes: vec![0; 8 * 1024],
            filled: 0,
            descriptors: Vec::new(),
            wanted: None,
        }
    }

    /// Returns the frame, or `None` at the end. With [`RecvFlags::DONTWAIT`] it may return
    /// `WouldBlock`; call it again when there is more data.
    pub(super) fn receive<T: DeserializeOwned>(
        &mut self,
        socket: impl AsFd,
        flags: RecvFlags,
    ) -> io::Result<Option<HelperFrame<T>>> {
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
        let head =
            postcard::from_bytes(&bytes[8..head_end]).map_err(|_| invalid_data("odd frame"))?;
        bytes.truncate(wanted);
        bytes.drain(..head_end);
        Ok(Some(HelperFrame {
            head,
            tail: bytes,
            descriptors: std::mem::take(&mut self.descriptors),
        }))
    }

    /// Receives available data; returns false at the end.
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
                return Err(invalid_data("frame too long"));
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

/// Serves file requests until the server closes the socket. This process is already confined.
///
/// `laid` are the paths of the mounts in the view; no request may create a path of `uncreatable_paths`.
pub(super) fn serve(socket: &OwnedFd, laid: &[SystemText], uncreatable_paths: &[SystemText]) -> ! {
    let view = ViewMountIds::remember(laid);
    let uncreatable_paths =
        UncreatablePaths(uncreatable_paths.iter().cloned().map(path_of).collect());
    loop {
        let Ok(Some(frame)) = receive::<HelperRequest>(socket) else {
            confine::exit(0)
        };
        let sent = if view.is_whole() {
            let done = perform(frame, socket, &uncreatable_paths)
                .unwrap_or_else(|error| HelperOutcome::from(HelperResponse::Failed(error)));
            let descriptors: Vec<_> = done.descriptors.iter().map(AsFd::as_fd).collect();
            send(socket, &done.reply, &done.content, &descriptors)
        } else {
            send(socket, &HelperResponse::Stale, &[], &[])
        };
        if sent.is_err() {
            confine::exit(0)
        }
    }
}

/// Mount ids of the paths in the view, to detect removed mounts.
///
/// If the host replaces a mounted-over file or directory, the kernel removes the mount, and the new
/// file is not covered. The sandbox of a command has the same weakness, but does not serve later
/// requests.
struct ViewMountIds(Vec<(PathBuf, Option<u64>)>);

impl ViewMountIds {
    fn remember(laid: &[SystemText]) -> Self {
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

/// Response with its content and descriptors.
struct HelperOutcome {
    reply: HelperResponse,
    content: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl From<HelperResponse> for HelperOutcome {
    fn from(reply: HelperResponse) -> Self {
        Self {
            reply,
            content: Vec::new(),
            descriptors: Vec::new(),
        }
    }
}

impl HelperOutcome {
    fn with(reply: HelperResponse, descriptors: Vec<OwnedFd>) -> Self {
        Self {
            descriptors,
            ..Self::from(reply)
        }
    }
}

/// Paths with a rule that do not exist and must not be created.
///
/// The paths of each request are resolved as the request itself will resolve them. A process that
/// exchanges a link meanwhile is no danger: a command that could do so holds placeholders for the
/// same names, which the request cannot replace.
struct UncreatablePaths(Vec<PathBuf>);

impl UncreatablePaths {
    /// Refuses a request that would create one of the paths, remove a placeholder, or rename a
    /// directory above such a path.
    fn check(&self, request: &FsRequest) -> Result<(), FsError> {
        if self.0.is_empty() || !request.writes() {
            return Ok(());
        }
        match request {
            FsRequest::WriteFile(params) => self.check_created(&fs::native(&params.path)?),
            FsRequest::CreateDirectory(params) => self.check_created(&fs::native(&params.path)?),
            FsRequest::CreateSymlink(params) => self.check_created(&fs::native(&params.path)?),
            FsRequest::Copy(params) => {
                let (from, to) = (&params.source_path, &params.destination_path);
                let (from, to) = (fs::native(from)?, fs::native(to)?);
                self.check_existing(&from)?;
                self.check_created(&to)?;
                self.check_merged(&from, &to)
            }
            FsRequest::Rename(params) => {
                let from = fs::native(&params.from)?;
                self.check_existing(&from)?;
                self.check_created(&fs::native(&params.to)?)?;
                let moved = policy::resolved(&from, &RealDisk).ok().flatten();
                match moved.filter(|moved| self.0.iter().any(|path| path.starts_with(moved))) {
                    Some(_) => Err(fs::at(&from)(Errno::BUSY)),
                    None => Ok(()),
                }
            }
            FsRequest::Remove(params) => {
                let path = fs::native(&params.path)?;
                self.check_existing(&path)?;
                // The removed directory could contain placeholders of commands that are running.
                let removed = policy::resolved(&path, &RealDisk).ok().flatten();
                let above = removed.is_some_and(|removed| {
                    let placeholder = |path: &&PathBuf| placeholder::is_one(path);
                    let inside = |path: &&PathBuf| path.starts_with(&removed);
                    self.0.iter().filter(inside).any(|path| placeholder(&path))
                });
                if params.recursive && above {
                    return Err(fs::at(&path)(Errno::BUSY));
                }
                Ok(())
            }
            FsRequest::SetMetadata(params) => self.check_existing(&fs::native(&params.path)?),
            _ => Ok(()),
        }
    }

    /// Refuses to create a path.
    fn check_created(&self, path: &Path) -> Result<(), FsError> {
        match self.first_missing(path)? {
            true => Err(fs::at(path)(Errno::ROFS)),
            false => Ok(()),
        }
    }

    /// Reports a placeholder as missing.
    fn check_existing(&self, path: &Path) -> Result<(), FsError> {
        match self.first_missing(path)? {
            true => Err(fs::at(path)(Errno::NOENT)),
            false => Ok(()),
        }
    }

    /// Refuses to merge a directory that contains one of the names into its parent directory.
    fn check_merged(&self, from: &Path, to: &Path) -> Result<(), FsError> {
        let Ok(Some(to)) = policy::resolved(to, &RealDisk) else {
            return Ok(());
        };
        let created = self.0.iter().filter_map(|path| {
            let below = path.strip_prefix(&to).ok()?;
            rustix::fs::lstat(from.join(below)).ok()?;
            Some(path)
        });
        match created.map(|path| fs::at(path)(Errno::ROFS)).next() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn first_missing(&self, path: &Path) -> Result<bool, FsError> {
        let missing = match policy::first_missing(path) {
            Ok(missing) => missing,
            // The request fails for the same reason.
            Err(PolicyError::Disk { .. }) => return Ok(false),
            Err(error) => return Err(FsError::Policy(error.to_string())),
        };
        Ok(missing.is_some_and(|missing| self.0.contains(&missing)))
    }
}

fn perform(
    frame: HelperFrame<HelperRequest>,
    socket: &OwnedFd,
    uncreatable_paths: &UncreatablePaths,
) -> Result<HelperOutcome, FsError> {
    match frame.head {
        HelperRequest::Protect(files) => {
            fs::protect_received(files);
            Ok(HelperResponse::Placed.into())
        }
        HelperRequest::Read {
            path,
            follow_symlinks,
            most,
        } => read_file(&path_of(path), fs::links(follow_symlinks), most),
        HelperRequest::Call { method, params } => {
            let Some(Ok(mut request)) = FsRequest::decode(&method, &params) else {
                return Err(FsError::Helper(format!("it cannot do `{method}`")));
            };
            if let FsRequest::WriteFile(params) = &mut request {
                params.data_base64 = frame.tail.into();
            }
            uncreatable_paths.check(&request)?;
            call(request, socket)
        }
        HelperRequest::Open(path, mode, create) => {
            let path = path_of(path);
            if mode != OpenMode::Read {
                uncreatable_paths.check_created(&path)?;
            }
            Ok(match OpenFile::open(&path, mode, create)?.send()? {
                fs::TransferredFile::Direct(file) => {
                    HelperOutcome::with(HelperResponse::File, vec![file.into()])
                }
                fs::TransferredFile::Aside(letter, directory, file) => {
                    HelperOutcome::with(HelperResponse::Aside(letter), vec![directory, file])
                }
            })
        }
        HelperRequest::Place(path, letter) => {
            let Ok([directory, file]) = <[OwnedFd; 2]>::try_from(frame.descriptors) else {
                return Err(FsError::Helper("it was given no file".to_owned()));
            };
            let path = path_of(path);
            uncreatable_paths.check_created(&path)?;
            fs::rename_into_place(&path, letter, directory, file)?;
            Ok(HelperResponse::Placed.into())
        }
    }
}

fn call(request: FsRequest, socket: &OwnedFd) -> Result<HelperOutcome, FsError> {
    // The server cancels a request by closing its end of the socket.
    let cancelled = || {
        let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
        let now = rustix::event::Timespec::default();
        let _ = rustix::event::poll(&mut fds, Some(&now));
        !fds[0].revents().is_empty()
    };
    let mut descriptors = Vec::new();
    if let FsRequest::GetMetadata(params) = &request {
        let links = fs::links(params.follow_symlinks);
        // If the entry cannot be opened, the request itself reports why.
        if let Ok(entry) = fs::entry(&fs::native(&params.path)?, links) {
            descriptors.push(entry.into());
        }
    }
    Ok(match fs::perform(request, &cancelled)? {
        FileOutcome::File { file, .. } => {
            HelperOutcome::with(HelperResponse::File, vec![file.into()])
        }
        FileOutcome::Content(content) => HelperOutcome {
            content,
            ..HelperResponse::Content.into()
        },
        FileOutcome::Directory { found, .. } => HelperResponse::Directory(found).into(),
        FileOutcome::Walked(walked) => HelperResponse::Walked(walked).into(),
        FileOutcome::Response(response) => {
            HelperOutcome::with(HelperResponse::Response(response.encode()), descriptors)
        }
    })
}

/// Reads a file of at most `most` bytes, or opens a longer one.
fn read_file(path: &Path, links: SymlinkPolicy, most: u32) -> Result<HelperOutcome, FsError> {
    if most == 0 {
        let file = fs::open_file(path, links)?;
        return Ok(HelperOutcome::with(HelperResponse::File, vec![file.into()]));
    }
    let (file, size) = fs::open_sized(path, links)?;
    if size <= u64::from(most) {
        let size = size as usize;
        // One extra byte shows whether the file has grown meanwhile.
        let mut content = vec![0; size + 1];
        if file.read_at(&mut content, 0).is_ok_and(|read| read == size) {
            content.truncate(size);
            return Ok(HelperOutcome {
                content,
                ..HelperResponse::Content.into()
            });
        }
    }
    // The file is too long, or has changed its size.
    Ok(HelperOutcome::with(HelperResponse::File, vec![file.into()]))
}
