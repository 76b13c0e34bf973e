//! Copy of the content of a file within the kernel, without its holes.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::metadata::STAT_BLOCK_BYTES;
use super::{CancelCheck, FsError, at, check_cancelled};

/// Bytes copied between two checks for cancellation.
const STEP_BYTES: u64 = 64 << 20;

/// Copies the content within the kernel; shares blocks where the filesystem supports it, and leaves
/// the holes of the source out.
pub(super) fn copy_content(
    from: &File,
    mut to: &File,
    destination: &Path,
    cancelled: CancelCheck<'_>,
) -> Result<(), FsError> {
    let found = rustix::fs::fstat(from).map_err(at(destination))?;
    let size = u64::try_from(found.st_size).unwrap_or(0);
    let allocated = u64::try_from(found.st_blocks).unwrap_or(0) * STAT_BLOCK_BYTES;
    if allocated < size && copy_around_holes(from, to, size, destination, cancelled)? {
        return Ok(());
    }
    loop {
        check_cancelled(cancelled)?;
        let copied = io::copy(&mut from.take(STEP_BYTES), &mut to).map_err(at(destination))?;
        if copied < STEP_BYTES {
            return Ok(());
        }
    }
}

/// Copies what is no hole; false if the filesystem does not report holes.
fn copy_around_holes(
    from: &File,
    mut to: &File,
    size: u64,
    destination: &Path,
    cancelled: CancelCheck<'_>,
) -> Result<bool, FsError> {
    let mut position = 0;
    loop {
        let (start, end) = match next_data(from, position) {
            Ok(Some(range)) => range,
            Ok(None) => {
                // The file may end with a hole.
                to.set_len(size).map_err(at(destination))?;
                return Ok(true);
            }
            Err(_) => return Ok(false),
        };
        for file in [from, to] {
            rustix::fs::seek(file, SeekFrom::Start(start)).map_err(at(destination))?;
        }
        position = start;
        while position < end {
            check_cancelled(cancelled)?;
            let step = STEP_BYTES.min(end - position);
            let copied = io::copy(&mut from.take(step), &mut to).map_err(at(destination))?;
            if copied == 0 {
                return Ok(true);
            }
            position += copied;
        }
    }
}

/// The next range of a file that is no hole, from an offset on; `None` behind the last one.
fn next_data(file: &File, offset: u64) -> Result<Option<(u64, u64)>, Errno> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Err(Errno::NXIO) => return Ok(None),
        start => start?,
    };
    Ok(Some((
        start,
        rustix::fs::seek(file, SeekFrom::Hole(start))?,
    )))
}
