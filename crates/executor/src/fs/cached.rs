//! Non-blocking reads and stats from the page cache and the dentry cache.
//!
//! The kernel can fail instead of waiting: `RESOLVE_CACHED` (Linux 5.12) looks up a path only in
//! the dentry cache, `RWF_NOWAIT` reads only pages in memory, `AT_STATX_DONT_SYNC` does not contact
//! a file server. Most calls concern files that were just used, and moving them to another thread
//! costs several times as much as the calls themselves. Everything here may be called where
//! blocking is not allowed; `None` means that the caller has to use the blocking function.
//!
//! Only for local filesystems: cached data of remote filesystems may be out of date.

use std::io::IoSliceMut;
use std::path::Path;

use exec_server_sync::RwLock;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

use super::metadata::STAT_BLOCK_BYTES;
use super::protected::is_ordinary;
use super::{FsError, PathMetadata, SymlinkPolicy, at};

/// Local filesystems that cache what is in use: bcachefs, btrfs, erofs, ext2 to 4, f2fs, overlayfs,
/// ramfs, squashfs, tmpfs, xfs, zfs.
const LOCAL: [u64; 11] = [
    0xca45_1a4e,
    0x9123_683e,
    0xe0f5_e1e2,
    0xef53,
    0xf2f5_2010,
    0x794c_7630,
    0x8584_58f6,
    0x7371_7368,
    0x0102_1994,
    0x5846_5342,
    0x2fc1_2fc1,
];

/// Devices that hold such filesystems and were seen so far.
static DEVICES: RwLock<Vec<(u32, u32)>> = RwLock::new(Vec::new());

/// More devices than a machine usually has in use; files on further devices use the blocking
/// functions.
const MAX_DEVICES: usize = 64;

/// Records the filesystem of a path, so that later calls can use the cache. May block.
pub(crate) fn record_filesystem(path: &Path) {
    let Ok(found) = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS) else {
        return;
    };
    if is_known(&found) {
        return;
    }
    let Ok(system) = rustix::fs::statfs(path) else {
        return;
    };
    // The sign extension is dropped: the magic numbers have 32 bits.
    if LOCAL.contains(&(system.f_type as u64 & 0xffff_ffff)) {
        let mut devices = DEVICES.write();
        if devices.len() < MAX_DEVICES {
            devices.push((found.stx_dev_major, found.stx_dev_minor));
        }
    }
}

fn is_known(found: &Statx) -> bool {
    DEVICES
        .read()
        .contains(&(found.stx_dev_major, found.stx_dev_minor))
}

fn resolve(links: SymlinkPolicy) -> ResolveFlags {
    match links {
        SymlinkPolicy::Follow => ResolveFlags::CACHED | ResolveFlags::NO_MAGICLINKS,
        SymlinkPolicy::Refuse => ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS,
    }
}

fn stat_at_once(fd: impl std::os::fd::AsFd) -> Option<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let found = rustix::fs::statx(&fd, c"", flags, wanted).ok()?;
    let device = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor);
    let changed = (found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec.into());
    // A protected file is left to the blocking function, which reports it.
    let is_usable = is_known(&found) && is_ordinary((device, found.stx_ino), changed, &fd);
    is_usable.then_some(found)
}

/// Same as [`metadata`](fn@super::metadata), if the answer is cached.
pub(crate) fn metadata_at_once(
    path: &Path,
    links: SymlinkPolicy,
) -> Option<Result<PathMetadata, FsError>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = match rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve(links)) {
        Ok(fd) => fd,
        Err(Errno::NOENT) => return Some(Err(at(path)(Errno::NOENT))),
        Err(_) => return None,
    };
    let found = stat_at_once(&fd)?;
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    if kind == FileType::Symlink {
        return None;
    }
    let millis = |time: rustix::fs::StatxTimestamp| {
        time.tv_sec
            .saturating_mul(1000)
            .saturating_add(i64::from(time.tv_nsec / 1_000_000))
    };
    let born = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
    Some(Ok(PathMetadata {
        is_directory: kind == FileType::Directory,
        is_file: kind == FileType::RegularFile,
        is_symlink: false,
        size: found.stx_size,
        created_at_ms: if born { millis(found.stx_btime) } else { 0 },
        modified_at_ms: millis(found.stx_mtime),
        mode: u32::from(found.stx_mode) & 0o7777,
        uid: found.stx_uid,
        gid: found.stx_gid,
        inode: found.stx_ino,
        device: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
        hard_links: u64::from(found.stx_nlink),
        allocated: found.stx_blocks.saturating_mul(STAT_BLOCK_BYTES),
        symlink_target: None,
    }))
}

/// The content of a regular file of at most `max` bytes, if all of it is cached.
pub(crate) fn read_at_once(path: &Path, links: SymlinkPolicy, max: usize) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve(links)).ok()?;
    let found = stat_at_once(&fd)?;
    let size = usize::try_from(found.stx_size).ok()?;
    if FileType::from_raw_mode(found.stx_mode.into()) != FileType::RegularFile || size > max {
        return None;
    }
    // One extra byte shows whether the file has grown meanwhile.
    let mut data = vec![0; size + 1];
    let mut buffers = [IoSliceMut::new(&mut data)];
    let read = rustix::io::preadv2(&fd, &mut buffers, 0, ReadWriteFlags::NOWAIT).ok()?;
    if read != size {
        return None;
    }
    data.truncate(size);
    Some(data)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::super::metadata;
    use super::*;

    /// Retries the call: the kernel may refuse it temporarily.
    fn soon<T>(mut ask: impl FnMut() -> Option<T>) -> Option<T> {
        (0..1000).find_map(|_| ask())
    }

    #[test]
    fn cached_metadata_and_content_match_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let file = dir.join("f");
        fs::write(&file, "hello").unwrap();
        symlink("f", dir.join("link")).unwrap();
        symlink(".", dir.join("via")).unwrap();
        record_filesystem(&dir);
        let local = LOCAL.contains(&(rustix::fs::statfs(&dir).unwrap().f_type as u64));
        let cached = |path: &Path, links| soon(|| metadata_at_once(path, links));
        if local && cached(&file, SymlinkPolicy::Follow).is_some() {
            // Following a link may update its access time on disk, and so may have to wait.
            for (path, links, surely) in [
                (&dir, SymlinkPolicy::Follow, true),
                (&file, SymlinkPolicy::Follow, true),
                (&file, SymlinkPolicy::Refuse, true),
                (&dir.join("via/f"), SymlinkPolicy::Follow, false),
            ] {
                match cached(path, links) {
                    Some(at_once) => {
                        assert_eq!(at_once.unwrap(), metadata(path, links).unwrap());
                    }
                    None => assert!(!surely, "{path:?}"),
                }
            }
            let read = |path: &Path, max| soon(|| read_at_once(path, SymlinkPolicy::Follow, max));
            assert_eq!(read(&file, 5).unwrap(), b"hello");
            assert!(read(&dir.join("link"), 5).is_none_or(|data| data == b"hello"));
        }
        // On every system these need the blocking functions.
        for path in [
            dir.join("link"),
            "/proc/self/status".into(),
            "/dev/null".into(),
        ] {
            assert!(
                !matches!(cached(&path, SymlinkPolicy::Refuse), Some(Ok(_))),
                "{path:?}"
            );
        }
        assert!(soon(|| read_at_once(&file, SymlinkPolicy::Follow, 4)).is_none());
        assert!(soon(|| read_at_once(&dir, SymlinkPolicy::Follow, 1 << 20)).is_none());
        assert!(cached(&dir.join("via/f"), SymlinkPolicy::Refuse).is_none());
        let missing = cached(&dir.join("missing"), SymlinkPolicy::Follow);
        assert!(!matches!(missing, Some(Ok(_))));
    }
}
