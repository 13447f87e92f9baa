/*
 * A kernel module that stands in for NVIDIA's on the virtual node: it binds to functions that look like an H100 and shows
 * what the real one shows without a GPU behind it.
 *
 *   /sys/bus/pci/drivers/nvidia                         bind and unbind work as with any driver
 *   /dev/nvidia<minor>, nvidiactl, nvidia-uvm, …        can be opened while the GPU is bound; nothing can be done with them
 *   /proc/driver/nvidia/version, gpus/<address>/information
 */
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>

#define NVIDIA_MAJOR 195 /* Documentation/admin-guide/devices.txt */
#define MINORS 256
#define MOST_GPUS 32
#define VERSION "580.105.08"

struct gpu {
	struct pci_dev *pci;
	struct proc_dir_entry *directory;
	int minor;
};

static const struct { unsigned int minor; const char *name; } shared_nodes[] = {
	{ 255, "nvidiactl" }, { 254, "nvidia-modeset" }, { 253, "nvidia-uvm" }, { 252, "nvidia-uvm-tools" },
};
static DEFINE_IDA(minors);
static struct gpu *gpus[MOST_GPUS];
static struct cdev nodes;
static struct proc_dir_entry *root, *gpu_root;

static char *devnode(const struct device *device, umode_t *mode)
{
	if (mode)
		*mode = 0666;
	return NULL;
}

static const struct class node_class = { .name = "nvidia", .devnode = devnode };

static int node_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);

	return minor >= MOST_GPUS || READ_ONCE(gpus[minor]) ? 0 : -ENODEV;
}

static const struct file_operations node_operations = { .owner = THIS_MODULE, .open = node_open };

static int show_version(struct seq_file *out, void *unused)
{
	seq_puts(out, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " VERSION "  (virtual node)\n");
	return 0;
}

static int show_information(struct seq_file *out, void *unused)
{
	struct gpu *gpu = out->private;

	seq_puts(out, "Model: \t\t NVIDIA H100 80GB HBM3\n");
	seq_printf(out, "IRQ:   \t\t %u\n", gpu->pci->irq);
	seq_printf(out, "GPU UUID: \t GPU-10de2330-0000-4000-8000-%08x%04x\n", pci_domain_nr(gpu->pci->bus), pci_dev_id(gpu->pci));
	seq_puts(out, "Video BIOS: \t 96.00.99.00.01\nBus Type: \t PCIe\n");
	seq_printf(out, "Bus Location: \t %s\nDevice Minor: \t %d\nGPU Excluded:\t No\n", pci_name(gpu->pci), gpu->minor);
	return 0;
}

static int probe(struct pci_dev *pci, const struct pci_device_id *id)
{
	struct gpu *gpu;
	int error = pcim_enable_device(pci);

	if (error)
		return error;
	gpu = devm_kzalloc(&pci->dev, sizeof(*gpu), GFP_KERNEL);
	if (!gpu)
		return -ENOMEM;
	gpu->pci = pci;
	gpu->minor = ida_alloc_max(&minors, MOST_GPUS - 1, GFP_KERNEL);
	if (gpu->minor < 0)
		return gpu->minor;
	gpu->directory = proc_mkdir(pci_name(pci), gpu_root);
	if (gpu->directory)
		proc_create_single_data("information", 0444, gpu->directory, show_information, gpu);
	pci_set_drvdata(pci, gpu);
	WRITE_ONCE(gpus[gpu->minor], gpu);
	device_create(&node_class, NULL, MKDEV(NVIDIA_MAJOR, gpu->minor), NULL, "nvidia%d", gpu->minor);
	return 0;
}

static void remove(struct pci_dev *pci)
{
	struct gpu *gpu = pci_get_drvdata(pci);

	device_destroy(&node_class, MKDEV(NVIDIA_MAJOR, gpu->minor));
	WRITE_ONCE(gpus[gpu->minor], NULL);
	proc_remove(gpu->directory);
	ida_free(&minors, gpu->minor);
}

static const struct pci_device_id ids[] = { { PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, 0x2330) }, {} };
MODULE_DEVICE_TABLE(pci, ids);
static struct pci_driver driver = { .name = "nvidia", .id_table = ids, .probe = probe, .remove = remove };

static void undo(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(shared_nodes); i++)
		device_destroy(&node_class, MKDEV(NVIDIA_MAJOR, shared_nodes[i].minor));
	proc_remove(root);
	cdev_del(&nodes);
	class_unregister(&node_class);
	unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, 0), MINORS);
}

static int __init start(void)
{
	unsigned int i;
	int error = register_chrdev_region(MKDEV(NVIDIA_MAJOR, 0), MINORS, "nvidia");

	if (error)
		return error;
	error = class_register(&node_class);
	if (error) {
		unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, 0), MINORS);
		return error;
	}
	cdev_init(&nodes, &node_operations);
	error = cdev_add(&nodes, MKDEV(NVIDIA_MAJOR, 0), MINORS);
	if (!error) {
		root = proc_mkdir("driver/nvidia", NULL);
		proc_create_single("version", 0444, root, show_version);
		gpu_root = proc_mkdir("gpus", root);
		for (i = 0; i < ARRAY_SIZE(shared_nodes); i++)
			device_create(&node_class, NULL, MKDEV(NVIDIA_MAJOR, shared_nodes[i].minor), NULL, "%s", shared_nodes[i].name);
		error = pci_register_driver(&driver);
	}
	if (error)
		undo();
	return error;
}

static void __exit stop(void)
{
	pci_unregister_driver(&driver);
	undo();
}

module_init(start);
module_exit(stop);
MODULE_DESCRIPTION("Stands in for NVIDIA's driver on a node whose GPUs are simulated");
MODULE_LICENSE("Dual MIT/GPL");
