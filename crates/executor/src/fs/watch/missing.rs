//! Waiting for a path to be created.
//!
//! Watches the existing parent directories of the paths with one inotify instance and no thread. An
//! event only triggers a check; the result depends on the state of the filesystem.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::inotify::{self, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::WatchError;
use super::tree::{init, is_unwatchable};

/// Wait for one of several missing paths to appear, or for an existing path to change.
#[derive(Debug)]
pub struct MissingPathWait {
    inotify: Arc<AsyncFd<OwnedFd>>,
    missing: Vec<PathBuf>,
    /// The first missing component of each path.
    awaited: Vec<PathBuf>,
    present: Option<PresentPath>,
    /// Relevant names in each watched directory.
    names: HashMap<i32, Vec<OsString>>,
}

#[derive(Debug)]
struct PresentPath {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
    descriptor: i32,
}

const FAR: WatchFlags = WatchFlags::DELETE_SELF
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::MASK_ADD);

const NEAR: WatchFlags = FAR
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE);

const PRESENT: WatchFlags = WatchFlags::MODIFY
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::MASK_ADD);

impl MissingPathWait {
    /// Starts watching. Blocks briefly; must be called within a runtime.
    ///
    /// Returns `None` if one of the missing paths exists, or the present path does not.
    ///
    /// # Errors
    ///
    /// When the user's inotify limit is reached.
    pub fn start(
        missing: Vec<PathBuf>,
        present: Option<PathBuf>,
    ) -> Result<Option<Self>, WatchError> {
        let inotify = exec_server_sys::poll::register(init()?, Interest::READABLE)
            .map_err(super::super::at(Path::new("inotify")))?;
        let mut watch = Self {
            inotify: Arc::new(inotify),
            missing,
            awaited: Vec::new(),
            present: None,
            names: HashMap::new(),
        };
        // Watch first and check afterwards, so that no change is missed in between.
        if let Some(path) = present {
            let descriptor = match inotify::add_watch(watch.inotify.get_ref(), &path, PRESENT) {
                Ok(descriptor) => descriptor,
                Err(error) if is_unwatchable(error) => return Ok(None),
                Err(error) => return Err(WatchError::register(&path, error)),
            };
            let Some(identity) = identity(&path) else {
                return Ok(None);
            };
            watch.present = Some(PresentPath {
                path,
                identity,
                descriptor,
            });
        }
        watch.arm()?;
        for path in &watch.missing {
            match first_missing(path) {
                Some(awaited) => watch.awaited.push(awaited),
                None => return Ok(None),
            }
        }
        Ok(Some(watch))
    }

    /// Waits until one of the paths or one of their missing parent directories appears, or the
    /// present path is changed or removed.
    ///
    /// # Errors
    ///
    /// When the paths can no longer be watched.
    pub async fn changed(mut self) -> io::Result<()> {
        let events = Arc::clone(&self.inotify);
        loop {
            let mut ready = events.readable().await?;
            let relevance = self.read();
            ready.clear_ready();
            match relevance? {
                EventRelevance::Nothing => continue,
                EventRelevance::Change => return Ok(()),
                EventRelevance::Maybe => {}
            }
            let looked = tokio::task::spawn_blocking(move || {
                let armed = self.arm();
                let changed = self.is_changed();
                (self, armed, changed)
            });
            let (watch, armed, changed) = looked.await.map_err(io::Error::other)?;
            if changed {
                return Ok(());
            }
            armed.map_err(io::Error::other)?;
            self = watch;
        }
    }

    /// Reads events from the kernel.
    fn read(&self) -> io::Result<EventRelevance> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(self.inotify.get_ref(), &mut buffer);
        let mut relevance = EventRelevance::Nothing;
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(relevance),
                Err(error) => return Err(error.into()),
            };
            let is_present = self
                .present
                .as_ref()
                .is_some_and(|present| present.descriptor == event.wd());
            let name = event
                .file_name()
                .map(|name| OsStr::from_bytes(name.to_bytes()));
            if is_present {
                return Ok(EventRelevance::Change);
            }
            let concerns = match (name, self.names.get(&event.wd())) {
                _ if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => true,
                (None, _) => true,
                (Some(name), names) => names.is_some_and(|names| names.iter().any(|n| n == name)),
            };
            if concerns {
                relevance = EventRelevance::Maybe;
            }
        }
    }

    /// Watches the existing parent directories of the paths.
    fn arm(&mut self) -> Result<(), WatchError> {
        self.names.clear();
        let present = self.present.as_ref().map(|present| &present.path);
        for path in self.missing.iter().chain(present) {
            let mut below: &Path = path;
            let mut near = 0;
            for directory in path.ancestors().skip(1) {
                // The two lowest existing directories: if the lower one is removed while a process
                // has it open, only the upper one reports the removal.
                let flags = if near < 2 { NEAR } else { FAR };
                match inotify::add_watch(self.inotify.get_ref(), directory, flags) {
                    Ok(descriptor) => {
                        near += 1;
                        let names = self.names.entry(descriptor).or_default();
                        names.extend(below.file_name().map(OsStr::to_owned));
                    }
                    Err(error) if is_unwatchable(error) => {}
                    Err(error) => return Err(WatchError::register(directory, error)),
                }
                below = directory;
            }
        }
        Ok(())
    }

    fn is_changed(&self) -> bool {
        let appeared = self.awaited.iter().any(|path| exists(path));
        let replaced = |present: &PresentPath| identity(&present.path) != Some(present.identity);
        appeared || self.present.as_ref().is_some_and(replaced)
    }
}

enum EventRelevance {
    Nothing,
    /// A relevant event that requires a check.
    Maybe,
    /// The present path changed.
    Change,
}

fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// The shortest prefix of a path that does not exist; `None` if the path exists.
fn first_missing(path: &Path) -> Option<PathBuf> {
    let mut missing = None;
    for part in path.ancestors() {
        if exists(part) {
            break;
        }
        missing = Some(part.to_owned());
    }
    missing
}
