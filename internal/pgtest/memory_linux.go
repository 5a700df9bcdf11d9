package pgtest

import "syscall"

// memoryDir returns a folder in memory that has room for clusters, or "". A
// container often has one of 64 MB, which a few databases would fill.
func memoryDir() string {
	const dir, enough = "/dev/shm", 1 << 30
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil || fs.Bavail*uint64(fs.Bsize) < enough {
		return ""
	}
	return dir
}
