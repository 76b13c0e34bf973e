//! File work under a policy: what the process that does it is asked and answers, and that process.
//!
//! It is confined once, before the first request, and does exactly one function of [`crate::fs`]
//! for each. Whatever a path leads to there, the kernel decides: no path is checked by us. Open
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
use std::sync::atomic::AtomicBool;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{OpenMode, SearchMatch, SearchParams, SearchResult, WalkOptions};
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
use crate::fs::search::{self, SearchError};
use crate::fs::wire::{Fault, path_of, text};
use crate::fs::{self, Attributes, FsError, Letter, Links, Listing, Metadata, OpenFile, Walked};
use crate::sys::confine;

/// More than any request or answer has.
const MAX_FRAME_BYTES: usize = 1 << 30;

/// Descriptors that a frame may bring.
const MAX_DESCRIPTORS: usize = 2;

/// What is to be done.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    Metadata(Text, Links),
    OpenFile(Text, Links),
    /// The content, if it is no longer than this; else the file.
    ReadFile(Text, Links, u32),
    Open(Text, OpenMode),
    /// With the directory and the file.
    Place(Text, Letter),
    /// The content is the tail.
    WriteFile(Text, Links, Attributes),
    CreateDirectory {
        path: Text,
        recursive: bool,
        links: Links,
    },
    ReadDirectory {
        path: Text,
        with_links: bool,
    },
    Walk(Text, Walk),
    Remove {
        path: Text,
        recursive: bool,
        force: bool,
        links: Links,
    },
    Copy {
        from: Text,
        to: Text,
        recursive: bool,
    },
    Rename {
        from: Text,
        to: Text,
        overwrite: bool,
    },
    Canonicalize(Text),
    SetMetadata(Text, Attributes, Links),
    CreateSymlink {
        path: Text,
        target: Text,
    },
    Hash(Text, Option<u64>),
    Search(Text, Search),
}

/// [`WalkOptions`] without what only JSON can say.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Walk {
    depth: usize,
    directories: usize,
    entries: usize,
    follow: bool,
    prune: bool,
}

impl From<WalkOptions> for Walk {
    fn from(options: WalkOptions) -> Self {
        Self {
            depth: options.max_depth,
            directories: options.max_directories,
            entries: options.max_entries,
            follow: options.follow_directory_symlinks,
            prune: options.prune_hidden_directories,
        }
    }
}

impl From<Walk> for WalkOptions {
    fn from(walk: Walk) -> Self {
        Self {
            max_depth: walk.depth,
            max_directories: walk.directories,
            max_entries: walk.entries,
            follow_directory_symlinks: walk.follow,
            prune_hidden_directories: walk.prune,
        }
    }
}

/// [`SearchParams`] without what only JSON can say.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Search {
    path: PathUri,
    pattern: String,
    regex: bool,
    case_sensitive: bool,
    globs: Vec<String>,
    gitignore: bool,
    max_matches: usize,
    context_lines: usize,
}

impl From<&SearchParams> for Search {
    fn from(params: &SearchParams) -> Self {
        Self {
            path: params.path.clone(),
            pattern: params.pattern.clone(),
            regex: params.regex,
            case_sensitive: params.case_sensitive,
            globs: params.globs.clone(),
            gitignore: params.gitignore,
            max_matches: params.max_matches,
            context_lines: params.context_lines,
        }
    }
}

impl From<Search> for SearchParams {
    fn from(search: Search) -> Self {
        Self {
            path: search.path,
            pattern: search.pattern,
            regex: search.regex,
            case_sensitive: search.case_sensitive,
            globs: search.globs,
            gitignore: search.gitignore,
            max_matches: search.max_matches,
            context_lines: search.context_lines,
            sandbox: None,
        }
    }
}

/// A [`SearchMatch`], all of its fields always there.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Match {
    path: PathUri,
    line: u64,
    column: u64,
    text: String,
    cut: bool,
    before: Vec<String>,
    after: Vec<String>,
}

/// A [`SearchResult`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Found {
    matches: Vec<Match>,
    files_searched: u64,
    truncated: bool,
}

impl From<SearchResult> for Found {
    fn from(result: SearchResult) -> Self {
        let each = |found: SearchMatch| Match {
            path: found.path,
            line: found.line,
            column: found.column,
            text: found.text,
            cut: found.cut,
            before: found.before,
            after: found.after,
        };
        Self {
            matches: result.matches.into_iter().map(each).collect(),
            files_searched: result.files_searched,
            truncated: result.truncated,
        }
    }
}

impl From<Found> for SearchResult {
    fn from(found: Found) -> Self {
        let each = |found: Match| SearchMatch {
            path: found.path,
            line: found.line,
            column: found.column,
            text: found.text,
            cut: found.cut,
            before: found.before,
            after: found.after,
        };
        Self {
            matches: found.matches.into_iter().map(each).collect(),
            files_searched: found.files_searched,
            truncated: found.truncated,
        }
    }
}

/// What came of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    /// With a descriptor of the entry: owners are seen through the namespace of whoever looks.
    Metadata(Metadata),
    /// With the file.
    File,
    /// With the content.
    Content,
    /// With the directory and the file.
    Aside(Letter),
    Listing(Listing, Vec<(usize, Text)>),
    Walked(Walked),
    Path(Text),
    Hash([u8; 32], u64),
    Found(Found),
    Failed(Fault),
    /// The pattern or a glob makes no sense.
    Pattern(String),
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
            let mut content = Vec::new();
            let done = match frame.head {
                Request::ReadFile(path, links, most) => {
                    read_file(&path_of(path), links, most, &mut content)
                }
                _ => perform(frame, socket),
            };
            let (answer, descriptors) = match done {
                Ok(done) => done,
                Err(error) => (Answer::Failed(error.into()), Vec::new()),
            };
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            send(socket, &answer, &content, &descriptors)
        } else {
            send(socket, &Answer::Stale, &[], &[])
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

type Done = (Answer, Vec<OwnedFd>);

/// Reads a file of at most so many bytes, or opens it.
fn read_file(path: &Path, links: Links, most: u32, content: &mut Vec<u8>) -> Result<Done, FsError> {
    let (file, size) = fs::open_sized(path, links)?;
    if size <= u64::from(most) {
        let size = size as usize;
        // One more shows whether it has grown meanwhile.
        content.resize(size + 1, 0);
        if file.read_at(content, 0).is_ok_and(|read| read == size) {
            content.truncate(size);
            return Ok((Answer::Content, Vec::new()));
        }
        content.clear();
    }
    // Too long, or not what it was a moment ago.
    Ok((Answer::File, vec![file.into()]))
}

fn perform(frame: Frame<Request>, socket: &OwnedFd) -> Result<Done, FsError> {
    let Frame {
        head,
        tail,
        descriptors,
    } = frame;
    // Whoever asked says that it does not care any more by closing its end.
    let cancelled = || {
        let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
        let now = rustix::event::Timespec::default();
        let _ = rustix::event::poll(&mut fds, Some(&now));
        !fds[0].revents().is_empty()
    };
    let done = |()| (Answer::Done, Vec::new());
    match head {
        Request::Metadata(path, links) => {
            let path = path_of(path);
            let found = fs::metadata(&path, links)?;
            let entry = fs::entry(&path, links)?;
            Ok((Answer::Metadata(found), vec![entry.into()]))
        }
        Request::OpenFile(path, links) | Request::ReadFile(path, links, _) => {
            let file = fs::open_file(&path_of(path), links)?;
            Ok((Answer::File, vec![file.into()]))
        }
        Request::Open(path, mode) => Ok(match OpenFile::open(&path_of(path), mode)?.send()? {
            fs::Opened::Direct(file) => (Answer::File, vec![file.into()]),
            fs::Opened::Aside(letter, directory, file) => {
                (Answer::Aside(letter), vec![directory, file])
            }
        }),
        Request::Place(path, letter) => {
            let Ok([directory, file]) = <[OwnedFd; 2]>::try_from(descriptors) else {
                return Err(FsError::Helper("it was given no file".to_owned()));
            };
            fs::place(&path_of(path), letter, directory, file).map(done)
        }
        Request::WriteFile(path, links, attributes) => {
            fs::write_file(&path_of(path), &tail, links, attributes).map(done)
        }
        Request::CreateDirectory {
            path,
            recursive,
            links,
        } => fs::create_directory(&path_of(path), recursive, links).map(done),
        Request::ReadDirectory { path, with_links } => {
            let path = path_of(path);
            let (listing, targets) = if with_links {
                fs::read_directory_with_links(&path, &cancelled)?
            } else {
                (fs::read_directory(&path, &cancelled)?, Default::default())
            };
            let targets = targets
                .into_iter()
                .map(|(position, target)| (position, text(&target)))
                .collect();
            Ok((Answer::Listing(listing, targets), Vec::new()))
        }
        Request::Walk(path, options) => {
            let walked = fs::walk(&path_of(path), options.into(), &cancelled)?;
            Ok((Answer::Walked(walked), Vec::new()))
        }
        Request::Remove {
            path,
            recursive,
            force,
            links,
        } => fs::remove(&path_of(path), recursive, force, links).map(done),
        Request::Copy {
            from,
            to,
            recursive,
        } => fs::copy(&path_of(from), &path_of(to), recursive, &cancelled).map(done),
        Request::Rename {
            from,
            to,
            overwrite,
        } => fs::rename(&path_of(from), &path_of(to), overwrite, &cancelled).map(done),
        Request::Canonicalize(path) => {
            let path = fs::canonicalize(&path_of(path))?;
            Ok((Answer::Path(text(&path)), Vec::new()))
        }
        Request::SetMetadata(path, attributes, links) => {
            fs::set_metadata(&path_of(path), attributes, links).map(done)
        }
        Request::CreateSymlink { path, target } => {
            fs::create_symlink(&path_of(path), &path_of(target)).map(done)
        }
        Request::Hash(path, length) => {
            let (digest, length) = fs::hash(&path_of(path), length, &cancelled)?;
            Ok((Answer::Hash(digest, length), Vec::new()))
        }
        Request::Search(path, search) => {
            // It has no steps between which to look; whoever loses interest ends this process.
            let never = AtomicBool::new(false);
            match search::search(&path_of(path), &search.into(), &never) {
                Ok(result) => Ok((Answer::Found(result.into()), Vec::new())),
                Err(SearchError::Fs(error)) => Err(error),
                Err(error) => Ok((Answer::Pattern(error.to_string()), Vec::new())),
            }
        }
    }
}
